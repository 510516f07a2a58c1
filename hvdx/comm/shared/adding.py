"""How the ranks' numbers are put together: in which dtype, scaled where, and divided how."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdx.comm.reduce_op import UFUNCS, ReduceOp, is_half, truncated_quotient


@dataclass(frozen=True)
class Adding:
    """One operation on one dtype.

    Args:
        op: the operation.
        dtype: of the tensors.
        ranks: number of ranks in the world, which an average divides by.
    """

    op: ReduceOp
    dtype: np.dtype
    ranks: int

    @functools.cached_property
    def ufunc(self) -> np.ufunc:
        """What puts two numbers together."""
        return UFUNCS[self.op]

    @functools.cached_property
    def wide(self) -> np.dtype | None:
        """The dtype that accumulates, where it is not the tensors' own."""
        if is_half(self.dtype):
            return np.dtype(np.float32)
        if self.divides_last:
            return np.dtype(np.uint64 if self.dtype.kind == "u" else np.int64)
        return None

    @property
    def divides_last(self) -> bool:
        """Whether numbers are divided after the addition of all: an average of integers."""
        return self.op is ReduceOp.AVERAGE and self.dtype.kind in "iu"

    @functools.cached_property
    def scale(self) -> Any:
        """What a number is multiplied by while it is copied: dividing then costs nothing, and no sum overflows."""
        if self.op is ReduceOp.AVERAGE and self.wide is None:
            return self.dtype.type(1.0 / self.ranks)
        return None

    def together(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Put the ranks' parts together, in their order; `out` may be one of the first two."""
        if self.wide is not None:
            out[:] = self.narrow(self.accumulate(parts))
        elif len(parts) == 1:
            if parts[0] is not out:
                np.copyto(out, parts[0])
        else:
            self.ufunc(parts[0], parts[1], out=out)
            for part in parts[2:]:
                self.ufunc(out, part, out=out)

    def accumulate(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the parts put together in the wide dtype."""
        total = self._widened(parts[0])
        for part in parts[1:]:
            self.ufunc(total, self._widened(part), out=total)
        return total

    def narrow(self, total: np.ndarray) -> np.ndarray:
        """Return accumulated numbers in the tensors' dtype."""
        if self.divides_last:
            total = truncated_quotient(total, self.ranks)
        return total.astype(self.dtype)

    def _widened(self, part: np.ndarray) -> np.ndarray:
        values = part.astype(self.wide)
        if self.op is ReduceOp.AVERAGE and is_half(self.dtype):
            # before the addition: even 32 bits cannot hold a sum of bfloat16's largest numbers
            values *= np.float32(1.0 / self.ranks)
        return values
