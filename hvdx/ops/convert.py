"""Turning what a user may pass (numbers, lists, numpy arrays, Keras variables) into a tensor."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdx.errors import UnsupportedError


def to_tensor(value: Any) -> Any:
    """Return `value` as a TensorFlow tensor; the variables of every Keras are read.

    Raises:
        UnsupportedError: it cannot be one (ragged, sparse, an object).
    """
    if isinstance(value, tf.Tensor):
        return value
    inner = getattr(value, "value", None)
    if inner is not None and not callable(inner):
        value = inner  # a variable of Keras 3: read it as it is stored, not as a dtype policy would cast it
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(
            f"Only tensors, arrays and numbers travel between ranks. Received: {type(value).__name__} ({error}). Use "
            "broadcast_object or allgather_object for anything else."
        ) from None
