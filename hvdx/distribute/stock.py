"""TensorFlow's own strategies as hvdx returns them: described, and refused by a sentence where Keras 3 cannot train."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdx import keras_api
from hvdx.distribute.description import Description
from hvdx.errors import UnsupportedError
from hvdx.logs import log

_CHECK = "hvdx_check_of_keras_3"


def described(strategy: Any, mode: str, within: str = "") -> Any:
    """Give a strategy of TensorFlow's the method `describe`.

    Args:
        strategy: the strategy.
        mode: by which name it was asked for.
        within: how gradients move, if there is more to say than that TensorFlow moves them.
    """

    def describe(self: Any) -> str:
        return str(Description.of(self, mode, within or "TensorFlow", "stock TensorFlow"))

    strategy.describe = types.MethodType(describe, strategy)
    return strategy


def refuse_keras_3(strategy: Any, instead: str) -> Any:
    """Let models of Keras 3 say when they are made under this strategy that they cannot be trained there.

    Args:
        strategy: the strategy.
        instead: what to do, as the end of a sentence that has begun.
    """

    def refuse() -> None:
        raise UnsupportedError(
            f"Keras 3 does not train under TensorFlow's own {type(strategy).__name__}. Use tf_keras, or {instead}."
        )

    return _checking(strategy, refuse)


def warn_keras_3(strategy: Any) -> Any:
    """Let the first model of Keras 3 under this strategy say what is wrong there, if it has several replicas."""

    def warn() -> None:
        if strategy.num_replicas_in_sync > 1 and not getattr(strategy, "hvdx_warned", False):
            strategy.hvdx_warned = True
            log.warning(
                "under TensorFlow's own %s, Keras 3 clips each replica's gradients before it reduces them, and cannot "
                'accumulate or average weights: its numbers are not those of one process. strategy("mirrored") '
                "without communicator= does it right.",
                type(strategy).__name__,
            )

    return _checking(strategy, warn)


def _checking(strategy: Any, check: Callable[[], None]) -> Any:
    """Have `check` called where a model of Keras 3 is made under the strategy."""
    scope = strategy.scope

    def adapted() -> Any:
        # by now Keras 3 has been imported, if it is to be used
        keras_api.change_method(keras_api.tensorflow_trainer_class_of_keras_3(), "__init__", _checked)
        return scope()

    strategy.scope = adapted
    setattr(strategy, _CHECK, check)
    return strategy


def _checked(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        getattr(tf.distribute.get_strategy(), _CHECK, lambda: None)()
        original(self, *args, **kwargs)

    return __init__
