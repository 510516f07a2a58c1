"""Turning what a user may pass (numbers, lists, numpy arrays, Keras variables) into a tensor."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def to_tensor(value: Any) -> Any:
    """Return `value` as a TensorFlow tensor; the variables of every Keras are read."""
    if isinstance(value, tf.Tensor):
        return value
    if isinstance(value, tf.IndexedSlices):
        return tf.convert_to_tensor(value)
    inner = getattr(value, "value", None)
    if inner is not None and not callable(inner):
        value = inner  # a variable of Keras 3: read it as it is stored, not as a dtype policy would cast it
    return tf.convert_to_tensor(value)
