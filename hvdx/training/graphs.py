"""The order of a program, which a bare v1 graph has not: what a new Keras optimizer needs to make an update there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def in_program_order(update: Callable[[], Any]) -> Any:
    """Return the operation that does in a v1 graph what `update` does, one line after the other.

    In a bare graph nothing orders the reading of a slot after its assignment; in a function TensorFlow does. Gradients
    become global outside of it, in the graph, where collectives are ordered for the session.
    """

    @tf.function(autograph=False)
    def run() -> Any:
        update()
        return tf.constant(True)

    return run().op
