"""All-reduce: every rank gets the sum, average, minimum, maximum or product of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdx import environment, world
from hvdx.comm.communicator import Label
from hvdx.comm.dtypes import numpy_dtype
from hvdx.comm.reduce_op import ReduceOp, require_reducible
from hvdx.compression import Codec, Compression, check_codec
from hvdx.errors import ConfigurationError
from hvdx.ops.convert import to_tensor
from hvdx.ops.sparse import allreduce_slices
from hvdx.ops.xla import refuse_inside_xla

Sum, Average, Min, Max, Product = ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def allreduce(
    tensor: Any,
    op: ReduceOp | str = Average,
    *,
    compression: Codec | Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> Any:
    """Reduce one tensor over all ranks; collective, differentiable, eager or in a graph.

    Args:
        tensor: numbers of any shape, the same shape and dtype on every rank; or `tf.IndexedSlices` (Sum and Average),
            which come back as `tf.IndexedSlices` with every index once.
        op: hvd.Average (default), Sum, Min, Max or Product; see `hvd.ReduceOp` for what is defined for which dtype.
        compression: what travels; `hvd.Compression.fp16` or `bf16` halves the bytes of float32.
        prescale_factor: multiplies the tensor before it travels.
        postscale_factor: multiplies the result.
        name: what to call the tensor in messages.

    Returns:
        A tensor of the same shape and dtype, with the same bits on every rank.

    Raises:
        MismatchError: ranks called different collectives, shapes or dtypes.
        StallError: a rank did not come within HVDX_TIMEOUT seconds.
        UnsupportedError: `op` is not defined for the dtype, or not offered by the communicator.

    The gradient with respect to a rank's own input is that of the sum of all ranks' losses. For Min and Max it goes to
    the ranks that hold the extreme value, in equal shares. Source: MPI 4.1 standard, section 6.9 (MPI_Allreduce).
    """
    if isinstance(tensor, tf.IndexedSlices):
        refuse_inside_xla()
        check_codec(compression)
        scaled = _scale_slices(tensor, prescale_factor)
        [reduced] = allreduce_slices([scaled], ReduceOp.of(op), [name or "tensor"], codec=compression)
        return _scale_slices(reduced, postscale_factor)
    [result] = grouped_allreduce(
        [tensor],
        op,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        names=[name] if name else None,
    )
    return result


def grouped_allreduce(
    tensors: Sequence[Any],
    op: ReduceOp | str = Average,
    *,
    compression: Codec | Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    names: Sequence[str] | None = None,
    fusion_threshold: int | None = None,
) -> list[Any]:
    """Reduce several tensors over all ranks at once, in fusion buffers; collective, differentiable.

    Args:
        tensors: as for `allreduce`; dtypes may be mixed.
        op, compression, prescale_factor, postscale_factor: as for `allreduce`, for every tensor.
        names: what to call the tensors in messages.
        fusion_threshold: largest fusion buffer in bytes; HVDX_FUSION_THRESHOLD where it is None.

    Returns:
        The results, in the order given. An empty list is allowed, and then nothing travels.

    Raises:
        As `allreduce`.
    """
    op = ReduceOp.of(op)
    values = [to_tensor(tensor) for tensor in tensors]
    if names is not None and len(names) != len(values):
        raise ConfigurationError(
            f"There must be one name a tensor. Received: {len(values)} tensors, {len(names)} names."
        )
    label = Label("tensor(s)", tuple(names or (f"tensor_{i}" for i in range(len(values)))))
    check_codec(compression)
    environment.check_threshold(fusion_threshold)
    threshold = environment.FUSION_THRESHOLD.read() if fusion_threshold is None else fusion_threshold
    values = [_scale(value, prescale_factor) for value in values]
    compressed, contexts = [], []
    for value in values:
        packed, context = compression.compress(value)
        compressed.append(packed)
        contexts.append(context)
    reduced = differentiable_allreduce(compressed, op, label, threshold)
    restored = [compression.decompress(value, context) for value, context in zip(reduced, contexts, strict=True)]
    return [_scale(value, postscale_factor) for value in restored]


def differentiable_allreduce(values: Sequence[Any], op: ReduceOp, label: Label, threshold: int) -> list[Any]:
    """Reduce tensors and register the gradient."""
    if not values:
        world.communicator()
        return []
    refuse_inside_xla()
    for value in values:
        require_reducible(numpy_dtype(value), op)
    communicator = world.communicator()

    @tf.custom_gradient
    def forward(*inputs: Any) -> Any:
        outputs = communicator.grouped_allreduce(list(inputs), op, label, threshold)

        def backward(*upstream: Any) -> list[Any]:
            return _gradients(inputs, outputs, upstream, op, label, threshold)

        return outputs, backward

    results = forward(*values)
    return list(results) if isinstance(results, list | tuple) else [results]


def _gradients(
    inputs: Sequence[Any], outputs: Sequence[Any], upstream: Sequence[Any], op: ReduceOp, label: Label, threshold: int
) -> list[Any]:
    about = Label("gradients of an allreduce", label.names)
    if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return differentiable_allreduce(upstream, op, about, threshold)
    total = differentiable_allreduce(upstream, ReduceOp.SUM, about, threshold)
    if op is ReduceOp.PRODUCT:
        return [grad * _product_of_others(value, about) for grad, value in zip(total, inputs, strict=True)]
    holds = [tf.cast(x == y, x.dtype) for x, y in zip(inputs, outputs, strict=True)]
    count = differentiable_allreduce(holds, ReduceOp.SUM, about, threshold)
    return [grad * own / n for grad, own, n in zip(total, holds, count, strict=True)]


def _product_of_others(value: Any, label: Label) -> Any:
    """Return the product of the other ranks' values: not the product divided by the own value, which may be zero."""
    stacked = world.communicator().allgather(value[tf.newaxis], label)
    others = tf.concat([stacked[: world.rank()], stacked[world.rank() + 1 :]], 0)
    return tf.reduce_prod(others, 0)


def _scale(value: Any, factor: float) -> Any:
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise ConfigurationError(f"A scale factor is a number. Received: {factor!r}.")
    if factor == 1.0:
        return value
    if not (value.dtype.is_floating or value.dtype.is_complex):
        raise ConfigurationError(f"scale factors need a floating-point tensor. Received: {value.dtype.name}, {factor}.")
    return value * tf.cast(factor, value.dtype)


def _scale_slices(slices: Any, factor: float) -> Any:
    return tf.IndexedSlices(_scale(slices.values, factor), slices.indices, slices.dense_shape)
