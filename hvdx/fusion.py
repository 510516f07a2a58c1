"""Which tensors share a fusion buffer, and where in it each one lies: pure functions on shapes and dtypes.

A plan is the same on every rank because it depends on nothing but shapes, dtypes and the threshold. Tensors are
taken in reverse order, since backpropagation finishes the gradients of the last layer first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

ALIGNMENT = 64
"""Bytes; where a tensor starts in a buffer. TensorFlow uses memory of this alignment in place, without a copy."""


@dataclass(frozen=True)
class Slot:
    """One tensor in a buffer: its place in the caller's list, its shape, and its offset in bytes."""

    index: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Bucket:
    """One fusion buffer: tensors of one dtype, in the order in which they lie."""

    dtype: np.dtype
    slots: tuple[Slot, ...]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """All fusion buffers of one reduction, in the order in which they are exchanged."""

    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, padding included."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def describe(self, names: Sequence[str] | None = None) -> str:
        """Return the plan as lines a person can read, one a buffer and one a tensor."""
        lines = [f"fusion plan: {len(self.buckets)} buffer(s), {self.nbytes:,} bytes"]
        for number, bucket in enumerate(self.buckets):
            lines.append(
                f"  buffer {number}: {bucket.dtype.name}, {len(bucket.slots)} tensor(s), {bucket.nbytes:,} bytes"
            )
            for slot in bucket.slots:
                name = names[slot.index] if names else f"tensor {slot.index}"
                shape = "x".join(map(str, slot.shape)) or "scalar"
                lines.append(f"    {slot.offset:>12,}  {name} {shape}")
        return "\n".join(lines)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plan(shapes: Sequence[Sequence[int]], dtypes: Sequence[np.dtype], threshold: int) -> Plan:
    """Place tensors into fusion buffers.

    Args:
        shapes: the shape of each tensor; a scalar is `()`, an empty tensor takes no bytes but keeps its slot.
        dtypes: the numpy dtype of each tensor; dtypes never share a buffer.
        threshold: largest buffer in bytes. A tensor larger than that gets a buffer of its own; 0 gives every tensor
            its own.

    Returns:
        The plan. Buffers are ordered by their first tensor in reverse order of the list.
    """
    open_slots: dict[np.dtype, list[Slot]] = {}
    open_bytes: dict[np.dtype, int] = {}
    finished: list[Bucket] = []

    def close(dtype: np.dtype) -> None:
        finished.append(Bucket(dtype, tuple(open_slots.pop(dtype)), open_bytes.pop(dtype)))

    for index in reversed(range(len(shapes))):
        shape, dtype = tuple(int(n) for n in shapes[index]), np.dtype(dtypes[index])
        nbytes = aligned(prod(shape) * dtype.itemsize)
        if dtype in open_slots and open_bytes[dtype] + nbytes > threshold:
            close(dtype)
        offset = open_bytes.get(dtype, 0)
        open_slots.setdefault(dtype, []).append(Slot(index, shape, offset))
        open_bytes[dtype] = offset + nbytes
    for dtype in list(open_slots):
        close(dtype)
    finished.sort(key=lambda bucket: -bucket.slots[0].index)
    return Plan(tuple(finished))


def views(bucket: Bucket, buffer: np.ndarray) -> list[np.ndarray]:
    """Return a view into `buffer` (uint8, at least `bucket.nbytes` long) for each slot, in slot order."""
    typed = buffer[: bucket.nbytes].view(bucket.dtype)
    size = bucket.dtype.itemsize
    result = []
    for slot in bucket.slots:
        start = slot.offset // size
        result.append(typed[start : start + prod(slot.shape)].reshape(slot.shape))
    return result


def pack(bucket: Bucket, tensors: Sequence[np.ndarray], buffer: np.ndarray, scale: float | None = None) -> None:
    """Copy the bucket's tensors into `buffer`, multiplied by `scale` on the way where one is given.

    The padding between tensors is set to zero: it travels too, and must not hold a signalling value.
    """
    for slot, view in zip(bucket.slots, views(bucket, buffer), strict=True):
        tensor = tensors[slot.index]
        if scale is None:
            np.copyto(view, tensor)
        else:
            np.multiply(tensor, bucket.dtype.type(scale), out=view)
    _clear_padding(bucket, buffer)


def _clear_padding(bucket: Bucket, buffer: np.ndarray) -> None:
    ends = [slot.offset for slot in bucket.slots[1:]] + [bucket.nbytes]
    for slot, end in zip(bucket.slots, ends, strict=True):
        start = slot.offset + prod(slot.shape) * bucket.dtype.itemsize
        if start < end:
            buffer[start:end] = 0


def unpack(plan: Plan, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the tensors in the caller's order, each a view into its buffer."""
    found: dict[int, np.ndarray] = {}
    for bucket, buffer in zip(plan.buckets, buffers, strict=True):
        for slot, view in zip(bucket.slots, views(bucket, buffer), strict=True):
            found[slot.index] = view
    return [found[index] for index in range(len(found))]


def buckets_in_reverse(sizes: Sequence[int], threshold: int, first: int) -> list[list[int]]:
    """Return which tensors travel together where buckets are to leave while others are still computed.

    Args:
        sizes: bytes of each tensor, in the order of the forward pass.
        threshold: bytes at which a bucket is full; a larger tensor has one of its own.
        first: the same for the bucket that leaves first: a small one lets the exchange begin early.

    Returns:
        Places in `sizes`, the last layer first.
    """
    result: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        limit = min(first, threshold) if len(result) <= 1 else threshold
        if not result or (filled and filled + sizes[index] > limit):
            result.append([])
            filled = 0
        result[-1].append(index)
        filled += sizes[index]
    return result
