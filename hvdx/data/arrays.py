"""Arrays as a batched dataset of this rank's part.

Only the samples of a batch are copied, when it is due: the arrays stay as they are, also memory-mapped ones, and no
rank holds them a second time as constants of TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.data.epochs import EpochCounter
from hvdx.data.options import ShardOptions
from hvdx.data.plan import ShardPlan
from hvdx.errors import ConfigurationError


def as_structure(data: Any) -> Any:
    """Return `data` with numpy arrays at its leaves and tuples for lists, which is how tf.data sees structures.

    Raises:
        ConfigurationError: a leaf has no first dimension or a dtype that TensorFlow lacks, or there is no leaf.
    """
    structure = _convert(data, "data")
    if not tf.nest.flatten(structure):
        raise ConfigurationError(f"hvd.shard got no array. Received: {data!r}.")
    return structure


def _convert(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _convert(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_convert(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise ConfigurationError(
            f"hvd.shard: {name} is a {type(value).__name__}. Pass it as a dataset: "
            "hvd.shard(tf.data.Dataset.from_tensor_slices(...), batch_size=...)."
        )
    return _as_array(value, name)


def _as_array(value: Any, name: str) -> np.ndarray:
    array = np.asarray(value)
    if array.ndim == 0:
        raise ConfigurationError(
            f"hvd.shard takes a tf.data.Dataset, or arrays in tuples and dicts; lists count as structures, so write "
            f"np.array([...]) around numbers. {name} has no first dimension. Received: {value!r}."
        )
    try:
        tf.as_dtype(array.dtype)
    except TypeError:
        raise ConfigurationError(f"hvd.shard: TensorFlow has no dtype for {name}, which is {array.dtype}.") from None
    return array


def number_of_samples(structure: Any) -> int:
    """Return the length that all arrays share.

    Raises:
        ConfigurationError: their lengths differ.
    """
    named = list(_named(structure, "data"))
    lengths = {len(array) for _, array in named}
    if len(lengths) > 1:
        listed = ", ".join(f"{name} {len(array):,}" for name, array in named)
        raise ConfigurationError(f"hvd.shard got arrays with different numbers of samples: {listed}.")
    return lengths.pop()


def _named(structure: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(structure, dict):
        for key, item in structure.items():
            yield from _named(item, f"{name}[{key!r}]")
    elif isinstance(structure, tuple):
        for index, item in enumerate(structure):
            yield from _named(item, f"{name}[{index}]")
    else:
        yield name, structure


def order_of_epoch(plan: ShardPlan, options: ShardOptions, epoch: int) -> np.ndarray:
    """Return the samples that this rank uses in an epoch, in its order."""
    order = np.arange(plan.owned(options.rank), dtype=np.int64)
    if options.shuffle:
        np.random.default_rng(options.random_state(epoch)).shuffle(order)
    return options.rank + plan.size * order[: plan.used(options.rank)]


def shard_arrays(structure: Any, plan: ShardPlan, options: ShardOptions) -> tf.data.Dataset:
    """Return a dataset of this rank's batches, of known length; each iteration over it is an epoch."""
    arrays = tf.nest.flatten(structure)
    ends = np.cumsum([0, *plan.batch_sizes(options.rank)])
    epochs = EpochCounter(options.initial_epoch)

    def begin() -> np.ndarray:
        return order_of_epoch(plan, options, epochs.next())

    def take(order: np.ndarray, step: np.ndarray) -> list[np.ndarray]:
        chosen = order[ends[step] : ends[step + 1]]
        return [np.take(array, chosen, axis=0) for array in arrays]

    def of_epoch(_: Any) -> tf.data.Dataset:
        order = tf.numpy_function(begin, [], tf.int64, stateful=True)
        order.set_shape([plan.used(options.rank)])
        return tf.data.Dataset.range(plan.steps).map(lambda step: batch(order, step))

    def batch(order: Any, step: Any) -> Any:
        tensors = tf.numpy_function(take, [order, step], [tf.as_dtype(a.dtype) for a in arrays], stateful=True)
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor.set_shape([plan.batch_size if plan.drop_remainder else None, *array.shape[1:]])
        return tf.nest.pack_sequence_as(structure, tensors)

    dataset = tf.data.Dataset.from_tensors(0).flat_map(of_epoch)
    return dataset.apply(tf.data.experimental.assert_cardinality(plan.steps))
