"""`model.compile` refuses a distributed optimizer of another Keras than the model's, in one sentence."""

from __future__ import annotations

from typing import Any

from hvdx import keras_api
from hvdx.training.xla import is_distributed


def check_in_compile() -> None:
    """Make `compile` of every Keras that has been imported refuse a distributed optimizer of another Keras.

    Keras itself says only that it cannot interpret it.
    """
    for cls in keras_api.model_classes():
        keras_api.change_method(cls, "compile", _checked)


def _checked(original: Any) -> Any:
    def compile(self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
        if keras_api.is_optimizer(optimizer) and is_distributed(optimizer):
            keras_api.check_optimizer_of_model(self, optimizer)
        return original(self, optimizer, *args, **kwargs)

    return compile
