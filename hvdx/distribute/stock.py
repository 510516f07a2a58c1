"""TensorFlow's own strategies as hvdx returns them: described, and refused by a sentence where Keras 3 cannot train."""

from __future__ import annotations

import types
from typing import Any

import tensorflow as tf

from hvdx import keras_api
from hvdx.distribute.description import Description
from hvdx.errors import UnsupportedError

_INSTEAD = "hvdx_instead"


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
    scope = strategy.scope
    setattr(strategy, _INSTEAD, instead)

    def refusing() -> Any:
        # by now it has been imported, if it is to be used
        keras_api.change_method(keras_api.tensorflow_trainer_class_of_keras_3(), "__init__", _checked)
        return scope()

    strategy.scope = refusing
    return strategy


def _checked(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        strategy = tf.distribute.get_strategy()
        instead = getattr(strategy, _INSTEAD, None)
        if instead is not None:
            raise UnsupportedError(
                f"Keras 3 does not train under TensorFlow's own {type(strategy).__name__}. Use tf_keras, or {instead}."
            )
        original(self, *args, **kwargs)

    return __init__
