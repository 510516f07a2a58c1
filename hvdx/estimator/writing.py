"""Rank 0 writes: what the other ranks' Estimators leave out, and a checkpoint that rank 0 must save."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvdx import world
from hvdx.errors import ConfigurationError
from hvdx.estimator.inputs import asking_like

v1 = tf.compat.v1
_WRITING = (
    v1.train.CheckpointSaverHook,
    v1.train.ProfilerHook,
    v1.train.StepCounterHook,
    v1.train.SummarySaverHook,
)
_SEED_STRIDE = 0x9E3779B1


def hooks_of_this_rank(hooks: Iterable[Any]) -> list[Any]:
    """Return the hooks that run here: on rank 0 all, on the others all but TensorFlow's own that write files.

    A class of the user's stays, though it derive from one of those: it may hold collectives, which all must meet.
    """
    return [hook for hook in hooks if world.rank() == 0 or type(hook) not in _WRITING]


def without_writing(estimator: Any, folder: str, seed: int) -> Any:
    """Return a copy for another rank than 0: it has a directory of its own, saves nothing, and drops other units."""
    other = copy.copy(estimator)
    other._model_dir = folder
    other._config = estimator.config.replace(
        model_dir=folder,
        save_checkpoints_secs=None,
        save_checkpoints_steps=None,
        save_summary_steps=0,
        log_step_count_steps=None,
        tf_random_seed=(seed + world.rank() * _SEED_STRIDE) % (1 << 31),
    )
    other._warm_start_settings = None  # rank 0's variables come by broadcast
    return _with_specs(other, _without_writing_hooks)


def saving(estimator: Any, hooks: Iterable[Any]) -> Any:
    """Return the Estimator of rank 0 for a training with these hooks, sure to save checkpoints.

    Raises:
        ConfigurationError: neither the config nor the hooks save, nor those of the model_fn, when it is called.
    """
    return estimator if saves(estimator.config) or any(map(_is_saver, hooks)) else _with_specs(estimator, _must_save)


def saves(config: Any) -> bool:
    """Return whether the RunConfig asks for checkpoints."""
    return bool(config.save_checkpoints_secs or config.save_checkpoints_steps)


def _is_saver(hook: Any) -> bool:
    return isinstance(hook, v1.train.CheckpointSaverHook)


def _must_save(spec: Any) -> Any:
    hooks = [*(spec.training_hooks or ()), *(spec.training_chief_hooks or ())]
    if spec.mode == "train" and not any(map(_is_saver, hooks)):
        raise ConfigurationError(
            "Rank 0 saves no checkpoints, so there is nothing to evaluate. Set save_checkpoints_steps or "
            "save_checkpoints_secs of the RunConfig, or give a CheckpointSaverHook for its model_dir to the TrainSpec."
        )
    return spec


def _without_writing_hooks(spec: Any) -> Any:
    """Return the EstimatorSpec without the hooks that one process alone is to run."""
    return spec._replace(
        training_hooks=tuple(hooks_of_this_rank(spec.training_hooks or ())),
        training_chief_hooks=(),
        evaluation_hooks=tuple(hooks_of_this_rank(spec.evaluation_hooks or ())),
    )


def _with_specs(estimator: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of the Estimator whose model_fn gives what `change` makes of its EstimatorSpec."""
    model_fn = getattr(estimator, "_model_fn", None)
    if model_fn is None:
        return estimator

    @asking_like(model_fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        spec = model_fn(*args, **kwargs)
        return change(spec) if hasattr(spec, "training_chief_hooks") else spec

    changed = copy.copy(estimator)
    changed._model_fn = call
    return changed
