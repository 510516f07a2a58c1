"""XLA compiles a function into one program in which no message can be sent: refuse it with a sentence."""

from __future__ import annotations

import sys
from types import FrameType

import tensorflow as tf

from hvdx import world
from hvdx.errors import XlaError


def refuse_inside_xla(devices: int = 1) -> None:
    """Raise where the function being traced will be compiled by XLA.

    Args:
        devices: of this process, between which something is exchanged.

    Raises:
        XlaError: it will; says what to write instead.
    """
    ranks = world.size() if world.is_initialized() else 1
    if tf.executing_eagerly() or ranks * devices == 1:
        return
    # TensorFlow does not tell a function body whether it is compiled; the tf.function that traces it stands above.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "Function" and getattr(owner, "_jit_compile", None) is True:
            raise XlaError(
                "The training step is compiled by XLA (jit_compile=True), and ranks and devices cannot exchange "
                "gradients inside it. Pass jit_compile=False to model.compile, or to tf.function in a loop of your own."
            )
        frame = frame.f_back
