"""Reducing 16-bit floats: 16 bits travel, 32 bits accumulate, in the order of ranks, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvdx.comm.reduce_op import ReduceOp

PIECE = 1 << 21
"""Numbers that are exchanged at a time: the copies this takes stay small however large a buffer is."""

Reduce = Callable[[np.ndarray, ReduceOp], None]
AllToAll = Callable[[np.ndarray, np.ndarray], None]
Gather = Callable[[np.ndarray, Sequence[int], np.ndarray], None]


def reduce_halves(
    values: np.ndarray, op: ReduceOp, size: int, reduce: Reduce, alltoall: AllToAll, gather: Gather
) -> None:
    """Reduce 16-bit floats in place, at most `PIECE` of them.

    Args:
        values: a 1-d buffer of float16 or bfloat16.
        op: any of the operations.
        size: how many ranks take part.
        reduce, alltoall, gather: move buffers between these ranks, as HostCommunicator's primitives do.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        wide = values.astype(np.float32)
        reduce(wide, op)
        values[:] = wide.astype(values.dtype)
        return
    share = -(-values.size // size)
    parts = np.zeros((size, share), values.dtype)
    parts.reshape(-1)[: values.size] = values
    received = np.empty_like(parts)
    alltoall(parts.view(np.uint8), received.view(np.uint8))
    # An average divides before it adds: even 32 bits cannot hold a sum of bfloat16's largest numbers.
    scale = np.float32(1.0 / size if op is ReduceOp.AVERAGE else 1.0)
    total = np.zeros(share, np.float32)
    with np.errstate(over="ignore"):
        for row in received:
            total += row.astype(np.float32) * scale
        mine = total.astype(values.dtype)
    gather(mine.view(np.uint8), [mine.nbytes] * size, parts.reshape(-1).view(np.uint8))
    values[:] = parts.reshape(-1)[: values.size]
