"""Noticing, before the first step of `fit`, that all ranks are about to train on the same data."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdx import keras_api, world
from hvdx.comm.first_batch import fingerprint, warn_once
from hvdx.ops.allgather import allgather

_SAME_ARRAYS = (
    "fit was given the SAME arrays on all %d ranks, so each of them trains on every sample: an epoch takes as long as "
    "in one process. Give each rank its own part with hvd.shard(...)."
)
_SAME_BATCH = (
    "all %d ranks read the SAME first batch, so they compute the same gradients: this trains like one process, N times "
    "over. Give each rank its own part of the data with hvd.shard(...)."
)


def warn_of_same_data(model: Any, iterator: Any) -> Any:
    """Compare the ranks' arrays and first batches, and warn if they are the same; collective.

    Args:
        model: the model whose train function is about to be called for the first time.
        iterator: what it will be called with.

    Returns:
        The iterator to call it with instead, which yields the same batches for that one call.
    """
    batches = _take(iterator, keras_api.steps_per_execution(model))
    arrays = keras_api.arrays_of_running_fit()
    marks = np.array([[fingerprint(arrays), fingerprint(_numbers(batches[0])) if batches else 0]], np.int64)
    everybody = np.array(allgather(tf.constant(marks), name="fingerprints of the data"))
    for place, message in enumerate((_SAME_ARRAYS, _SAME_BATCH)):
        if marks[0, place] and (everybody[:, place] == marks[0, place]).all():
            warn_once(message % world.size())
            break
    return _give(batches, iterator)


def _numbers(batch: Any) -> list[np.ndarray]:
    """Return the dense numbers and texts in a batch; Keras 3 wraps what may be absent in optionals."""
    found = []
    for part in tf.nest.flatten(batch, expand_composites=True):
        if isinstance(part, tf.experimental.Optional):
            found += _numbers(part.get_value()) if part.has_value() else []
        elif hasattr(part, "__array__"):
            found.append(np.asarray(part))
    return found


def _take(iterator: Any, count: int) -> list[Any]:
    """Return the next batches, at most `count`."""
    if not isinstance(iterator, tf.data.Iterator):
        return []  # of a tf.distribute strategy
    return [batch for _, batch in zip(range(count), iterator, strict=False)]


def _give(batches: list[Any], iterator: Any) -> Any:
    """Return an iterator over batches taken from `iterator`, of the same type, so that nothing is traced anew."""
    if not batches:
        return iterator
    data = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        data = data.concatenate(_with_spec(tf.data.Dataset.from_tensors(batch), data.element_spec))
    return iter(_with_spec(data, iterator.element_spec))


def _with_spec(data: Any, spec: Any) -> Any:
    return tf.data.experimental.from_variant(tf.data.experimental.to_variant(data), spec)
