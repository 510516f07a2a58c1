"""XLA compiles a step into one program, in which nothing can be sent: refuse it with a sentence, switch "auto" off."""

from __future__ import annotations

from typing import Any

from hvdx import keras_api, world
from hvdx.logs import log
from hvdx.training.under_strategy import is_of_hvdx


def switch_auto_off() -> None:
    """Make Keras 3's `jit_compile="auto"` mean False for models whose optimizer or strategy is hvdx's."""
    keras_api.change_method(keras_api.trainer_class_of_keras_3(), "_resolve_auto_jit_compile", _off_between_ranks)


def _off_between_ranks(original: Any) -> Any:
    def resolve(self: Any) -> bool:
        ours = is_distributed(getattr(self, "optimizer", None)) or is_of_hvdx(
            getattr(self, "_distribute_strategy", None)
        )
        if ours and world.is_initialized() and world.size() > 1:
            if original(self):
                log.warning('jit_compile="auto" means False here: ranks cannot exchange gradients inside XLA.')
            return False
        return original(self)

    return resolve


def is_distributed(optimizer: Any) -> bool:
    """Return whether `optimizer`, or the one inside its LossScaleOptimizer, has been wrapped by hvdx."""
    return optimizer is not None and hasattr(type(keras_api.inner_optimizer(optimizer)), "hvdx_reducer")
