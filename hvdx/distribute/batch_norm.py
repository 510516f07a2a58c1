"""Batch normalisation of Keras 3 under a strategy: what tf_keras and Keras 2 do by themselves.

There the moving statistics are variables that each replica keeps for itself and that are averaged when they are read
outside of a replica; and a replica that got no rows of a last batch, whose mean is no number, leaves them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdx import keras_api
from hvdx.training.under_strategy import current

_MOVING = ("moving_mean", "moving_variance")


def adapt_batch_norm() -> None:
    """Adapt the layer of Keras 3, where it has been imported."""
    keras_api.change_method(keras_api.batch_normalization_class_of_keras_3(), "_moments", _of_rows)


def averaged_on_reading(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a variable is created with, where it is a moving statistic of Keras 3 as a mean over replicas."""
    name = str(given.get("name") or "").rpartition("/")[2]
    alone = given.get("aggregation", tf.VariableAggregation.NONE) is tf.VariableAggregation.NONE
    if name not in _MOVING or not alone or given.get("trainable"):
        return dict(given)
    on_read, mean = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.MEAN
    return {**given, "synchronization": on_read, "aggregation": mean}


def _of_rows(original: Any) -> Any:
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        found = original(self, inputs, mask)
        if current() is None:
            return found
        empty = tf.equal(tf.size(inputs), 0)
        known = (self.moving_mean, self.moving_variance)
        return tuple(
            tf.where(empty, tf.reshape(tf.cast(before, moment.dtype), tf.shape(moment)), moment)
            for moment, before in zip(found, known, strict=True)
        )

    return _moments
