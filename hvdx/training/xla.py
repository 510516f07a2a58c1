"""XLA compiles a step into one program, in which nothing can be sent: refuse it with a sentence, switch "auto" off."""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from hvdx import keras_api, world
from hvdx.errors import XlaError
from hvdx.logs import log


def refuse_inside_xla() -> None:
    """Raise where the function being traced will be compiled by XLA.

    Raises:
        XlaError: it will; says what to write instead.
    """
    if tf.executing_eagerly() or not world.is_initialized() or world.size() == 1:
        return
    # TensorFlow does not tell a function body whether it is compiled; the tf.function that traces it stands above.
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "Function" and getattr(owner, "_jit_compile", None) is True:
            raise XlaError(
                "The training step is compiled by XLA (jit_compile=True), and ranks cannot exchange gradients inside "
                "it. Pass jit_compile=False to model.compile, or to tf.function in a loop of your own."
            )
        frame = frame.f_back  # type: ignore[assignment]


def switch_auto_off() -> None:
    """Make Keras 3's `jit_compile="auto"` mean False for models whose optimizer is distributed."""
    trainer = keras_api.trainer_class_of_keras_3()
    if trainer is None or getattr(trainer._resolve_auto_jit_compile, "hvdx", False):
        return
    original = trainer._resolve_auto_jit_compile

    def resolve(self: Any) -> bool:
        if is_distributed(getattr(self, "optimizer", None)) and world.is_initialized() and world.size() > 1:
            if original(self):
                log.warning('jit_compile="auto" means False here: ranks cannot exchange gradients inside XLA.')
            return False
        return original(self)

    resolve.hvdx = True  # type: ignore[attr-defined]
    trainer._resolve_auto_jit_compile = resolve


def is_distributed(optimizer: Any) -> bool:
    """Return whether `optimizer`, or the one inside its LossScaleOptimizer, has been wrapped by hvdx."""
    return optimizer is not None and hasattr(type(keras_api.inner_optimizer(optimizer)), "hvdx_reducer")
