"""Gradients and other arrays of several workers made one, always in the order of workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from hvdx.comm.reduce_op import UFUNCS, ReduceOp, is_half, require_reducible, truncated_quotient
from hvdx.errors import GradientError


@dataclass(frozen=True)
class Rows:
    """Some rows of a gradient; the others are zero. `indices` are sorted, each is there once."""

    indices: np.ndarray
    values: np.ndarray

    def between(self, start: int, stop: int) -> Rows:
        """Return the rows from `start` to `stop`, counted from `start`."""
        first, last = np.searchsorted(self.indices, [start, stop])
        return Rows(self.indices[first:last] - start, self.values[first:last])

    def dense(self, shape: Sequence[int]) -> np.ndarray:
        """Return the whole array."""
        result = np.zeros(tuple(shape), self.values.dtype)
        result[self.indices] = self.values
        return result


Gradient = np.ndarray | Rows


def rows(indices: np.ndarray, values: np.ndarray) -> Rows:
    """Return rows with each index once; the values of one that is there several times are summed in their order."""
    order = np.argsort(indices, kind="stable")
    unique, starts = np.unique(indices[order], return_index=True)
    if len(unique) == len(indices):
        return Rows(unique, values[order])
    wide = values[order].astype(np.float32) if is_half(values.dtype) else values[order]
    return Rows(unique, np.add.reduceat(wide, starts, axis=0).astype(values.dtype) if len(unique) else values[:0])


def combined(
    gradients: Sequence[Gradient | None],
    shape: Sequence[int],
    name: str,
    workers: Sequence[int],
    average: bool = True,
) -> Any:
    """Return the average or sum of the workers' gradients of one piece, or None where none has one.

    Args:
        gradients: one for each worker; rows that a worker has not count as zeros.
        shape: of the piece.
        name: of the variable, for the message.
        workers: their numbers, for the message.
        average: whether the sum is divided by the number of workers.

    Raises:
        GradientError: some workers have no gradient.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        return None
    if len(given) < len(gradients):
        lacking = [worker for worker, gradient in zip(workers, gradients, strict=True) if gradient is None]
        raise GradientError(
            f"Some workers have no gradient for a variable that has one on others: {name}, none on worker(s) "
            f"{', '.join(map(str, lacking))}. Let the loss depend on the same variables on every worker."
        )
    if len(given) == 1:
        return given[0]
    if all(isinstance(gradient, Rows) for gradient in given):
        share = 1.0 / len(given) if average else 1.0
        values = np.concatenate([_scaled(gradient.values, share) for gradient in given])  # type: ignore[union-attr]
        total = rows(np.concatenate([gradient.indices for gradient in given]), values)  # type: ignore[union-attr]
        return Rows(total.indices, total.values.astype(given[0].values.dtype))  # type: ignore[union-attr]
    dense = [gradient.dense(shape) if isinstance(gradient, Rows) else gradient for gradient in given]
    return reduced(dense, ReduceOp.AVERAGE if average else ReduceOp.SUM)


def squared_norm(gradient: Gradient | None) -> float | None:
    """Return the sum of the squares."""
    if gradient is None:
        return None
    values = (gradient.values if isinstance(gradient, Rows) else gradient).astype(np.float64).reshape(-1)
    return float(np.dot(values, values))


def scaled(gradient: Gradient | None, factor: float) -> Gradient | None:
    """Return the gradient times a factor."""
    if gradient is None or factor == 1.0:
        return gradient
    if isinstance(gradient, Rows):
        return Rows(gradient.indices, gradient.values * gradient.values.dtype.type(factor))
    return gradient * gradient.dtype.type(factor)


def reduced(arrays: Sequence[np.ndarray], op: ReduceOp) -> np.ndarray:
    """Return the arrays of all workers reduced in the order of workers, with the meaning of `hvd.allreduce`."""
    dtype = arrays[0].dtype
    require_reducible(dtype, op)
    if op is ReduceOp.AVERAGE and dtype.kind in "iu":
        wide = [array.astype(np.uint64 if dtype.kind == "u" else np.int64) for array in arrays]
        return truncated_quotient(reduce(np.add, wide), len(arrays)).astype(dtype)
    if op is ReduceOp.AVERAGE:
        share = 1.0 / len(arrays)
        total = _scaled(arrays[0], share)
        for array in arrays[1:]:
            total += _scaled(array, share)
        return total.astype(dtype)
    function: Any = UFUNCS[op]
    with np.errstate(over="ignore"):
        result = reduce(function, [array.astype(np.float32) if is_half(dtype) else array for array in arrays])
    return np.asarray(result).astype(dtype)


def _scaled(array: np.ndarray, share: float) -> np.ndarray:
    """Return a new array times a number, in 32 bits where it has 16: divided before it is added, nothing overflows."""
    wide = array.astype(np.float32) if is_half(array.dtype) else array
    return np.asarray(wide * wide.dtype.type(share))
