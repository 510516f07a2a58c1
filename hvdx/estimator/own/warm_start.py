"""Starting a model from the variables of another checkpoint or SavedModel."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import tensorflow as tf

from hvdx.errors import ConfigurationError

VocabInfo = tf.compat.v1.train.VocabInfo


class _Fields(NamedTuple):
    ckpt_to_initialize_from: str
    vars_to_warm_start: Any
    var_name_to_vocab_info: dict[str, Any]
    var_name_to_prev_var_name: dict[str, str]


class WarmStartSettings(_Fields):
    """Which variables start from which checkpoint.

    Args:
        ckpt_to_initialize_from: a checkpoint, or a directory whose latest one is taken.
        vars_to_warm_start: a regular expression for trainable variables (default: all of them), a list of expressions
            or of variables for others too, or None for those with a vocabulary only.
        var_name_to_vocab_info: dict of variable names to `tf.compat.v1.train.VocabInfo`.
        var_name_to_prev_var_name: dict of variable names to their names in the checkpoint.

    Raises:
        ConfigurationError: no checkpoint is given.
    """

    __slots__ = ()

    def __new__(
        cls,
        ckpt_to_initialize_from: str,
        vars_to_warm_start: Any = ".*",
        var_name_to_vocab_info: dict[str, Any] | None = None,
        var_name_to_prev_var_name: dict[str, str] | None = None,
    ) -> WarmStartSettings:
        if not ckpt_to_initialize_from:
            raise ConfigurationError("WarmStartSettings needs ckpt_to_initialize_from, a checkpoint or a directory.")
        return super().__new__(
            cls,
            ckpt_to_initialize_from,
            vars_to_warm_start,
            var_name_to_vocab_info or {},
            var_name_to_prev_var_name or {},
        )


def warm_start_settings(warm_start_from: Any) -> WarmStartSettings | None:
    """Return the settings for what an Estimator was given as `warm_start_from`.

    Args:
        warm_start_from: None, settings, or the path of a checkpoint, of a directory of them or of a SavedModel.

    Raises:
        ConfigurationError: something else.
    """
    if warm_start_from is None or isinstance(warm_start_from, WarmStartSettings):
        return warm_start_from
    if not isinstance(warm_start_from, (str, bytes, os.PathLike)):
        raise ConfigurationError(
            f"warm_start_from must be the path of a checkpoint or WarmStartSettings; received {warm_start_from!r}."
        )
    path = os.fsdecode(warm_start_from)
    saved_model_variables = os.path.join(path, "variables", "variables")
    exists = tf.io.gfile.exists(saved_model_variables + ".index")
    return WarmStartSettings(saved_model_variables if exists else path)


def warm_start_checkpoint(settings: WarmStartSettings | None) -> str | None:
    """Return the path of the checkpoint to start from, None if there is none."""
    path = settings.ckpt_to_initialize_from if settings is not None else None
    return tf.train.latest_checkpoint(path) if path and tf.io.gfile.isdir(path) else path


def warm_start(settings: WarmStartSettings | None) -> None:
    """Let the variables of the graph that is being built start as the settings say; None changes nothing."""
    if settings is not None:
        tf.compat.v1.logging.info("Warm start from %s.", settings.ckpt_to_initialize_from)
        tf.compat.v1.train.warm_start(*settings)
