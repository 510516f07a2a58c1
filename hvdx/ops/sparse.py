"""Reducing IndexedSlices: touched rows travel, duplicates summed first, unless the dense tensor is smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdx import environment, world
from hvdx.comm.communicator import Label
from hvdx.comm.order import in_order, together
from hvdx.comm.reduce_op import ReduceOp
from hvdx.compression import Codec, Compression
from hvdx.errors import UnsupportedError


def deduplicate(slices: Any) -> Any:
    """Return the same slices with every index once, the values of duplicates summed."""
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def times(value: Any, factor: Any) -> Any:
    """Return a tensor, or the rows of IndexedSlices, times a number."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(times(value.values, factor), value.indices, value.dense_shape)
    return value * tf.cast(factor, value.dtype)


def allreduce_slices(
    all_slices: Sequence[Any],
    op: ReduceOp,
    names: Sequence[str],
    allow_dense: bool = False,
    *,
    codec: Codec | Any = Compression.none,
    threshold: int | None = None,
) -> list[Any]:
    """Reduce IndexedSlices over all ranks; collective.

    Args:
        all_slices: IndexedSlices, of the same dense shape on every rank; the number of rows may differ.
        op: Sum or Average. Average divides by the number of ranks, also for rows that one rank alone touched, so that
            the result is the average of the dense tensors.
        names: one name each, for messages.
        allow_dense: send the dense tensor where that is fewer bytes. The ranks decide together, on the sum of their
            row counts, each time the operation runs.
        codec: what of the values travels.
        threshold: largest fusion buffer in bytes, for dense tensors; HVDX_FUSION_THRESHOLD where it is None.

    Returns:
        IndexedSlices with every index once, equal on all ranks.

    Raises:
        UnsupportedError: another operation.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise UnsupportedError(f"IndexedSlices are reduced with hvd.Sum or hvd.Average. Received: {op!r}.")
    unique = [deduplicate(slices) for slices in all_slices]
    with together(unique):
        if allow_dense:
            return _smallest(unique, op, names, codec, threshold)
        return [_gathered(slices, op, name, codec) for slices, name in zip(unique, names, strict=True)]


def _smallest(
    unique: Sequence[Any], op: ReduceOp, names: Sequence[str], codec: Codec | Any, threshold: int | None
) -> list[Any]:
    rows = [tf.shape(slices.indices, tf.int64)[0] for slices in unique]
    [total] = world.communicator().grouped_allreduce(
        [tf.stack(rows)], ReduceOp.SUM, Label("row counts of sparse gradients", (", ".join(names),)), 0
    )
    results = []
    for number, (slices, name) in enumerate(zip(unique, names, strict=True)):
        results.append(_smaller(slices, op, name, total[number], codec, threshold))
    return results


def _smaller(slices: Any, op: ReduceOp, name: str, total_rows: Any, codec: Codec | Any, threshold: int | None) -> Any:
    """Choose between the two ways. A ring moves the dense tensor twice; a gather moves every rank's rows once."""
    shape = slices.dense_shape
    if shape is None:
        return _gathered(slices, op, name, codec)
    shape = tf.cast(shape, tf.int64)
    row_bytes = tf.reduce_prod(shape[1:]) * slices.values.dtype.size
    gather_bytes = total_rows * (row_bytes + slices.indices.dtype.size)
    dense_bytes = 2 * shape[0] * row_bytes

    def dense() -> tuple[Any, Any]:
        whole = tf.math.unsorted_segment_sum(slices.values, slices.indices, shape[0])
        # Optimizers that update only the rows of a sparse gradient must get the rows that one process would touch.
        flags = tf.ones_like(slices.indices, whole.dtype) * tf.cast(world.size(), whole.dtype)  # an average is above 0
        touched = tf.math.unsorted_segment_sum(flags, slices.indices, shape[0])
        packed, context = codec.compress(whole)
        packed, touches = world.communicator().grouped_allreduce(
            [packed, touched],
            op,
            Label("sparse gradients, densified", (name, f"{name} (rows touched)")),
            environment.FUSION_THRESHOLD.read() if threshold is None else threshold,
        )
        reduced = codec.decompress(packed, context)
        rows = tf.where(tf.not_equal(touches, 0))[:, 0]
        return tf.gather(reduced, rows), tf.cast(rows, slices.indices.dtype)

    def gathered() -> tuple[Any, Any]:
        result = _gathered(slices, op, name, codec)
        return result.values, result.indices

    values, indices = in_order(lambda: list(tf.cond(gather_bytes < dense_bytes, gathered, dense)))
    values.set_shape([None, *slices.values.shape[1:]])
    indices.set_shape([None])
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _gathered(slices: Any, op: ReduceOp, name: str, codec: Codec | Any) -> Any:
    communicator = world.communicator()
    values = slices.values
    size = tf.cast(communicator.topology.size, values.dtype)
    exact = values.dtype.is_integer  # divided last, and towards zero, as dense integers are
    if op is ReduceOp.AVERAGE and not exact:
        values = values / size
    values, context = codec.compress(values)
    indices = communicator.allgather(slices.indices, Label("indices of sparse gradients", (name,)))
    gathered = codec.decompress(communicator.allgather(values, Label("rows of sparse gradients", (name,))), context)
    result = deduplicate(tf.IndexedSlices(gathered, indices, slices.dense_shape))
    if op is ReduceOp.AVERAGE and exact:
        return tf.IndexedSlices(tf.truncatediv(result.values, size), result.indices, result.dense_shape)
    return result
