"""Moving whole numpy buffers between the ranks of an mpi4py communicator, in pieces that MPI can count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hvdx.comm.mpi_library import MPI
from hvdx.comm.reduce_op import ReduceOp

_PIECE = 1 << 30
"""Bytes in one MPI call; MPI counts elements in 32 bits."""
_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX, ReduceOp.PRODUCT: MPI.PROD}


class MpiBuffers:
    """Blocking collectives of one MPI communicator; the ranks have agreed on each call before.

    Args:
        comm: an mpi4py communicator for nothing else.
        payload: gives the context in which every call runs: it watches it, and turns what MPI raises into an error.
    """

    def __init__(self, comm: Any, payload: Callable[[], AbstractContextManager[None]]) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._payload = payload

    def reduce(self, buffer: np.ndarray, op: ReduceOp) -> None:
        """Reduce a typed 1-d buffer in place (Sum, Min, Max or Product; never 16-bit floats)."""
        step = _PIECE // buffer.dtype.itemsize
        with self._payload():
            for start in range(0, buffer.size, step):
                self.comm.Allreduce(MPI.IN_PLACE, buffer[start : start + step], _OPS[op])

    def gather(self, part: np.ndarray, counts: Sequence[int], result: np.ndarray) -> None:
        """Put every rank's uint8 `part` (of `counts[rank]` bytes) into `result`, in the order of ranks."""
        with self._payload():
            if sum(counts) <= _PIECE:
                self.comm.Allgatherv(part, [result, list(counts)])
                return
            start = 0
            for root, count in enumerate(counts):
                piece = result[start : start + count]
                if root == self.rank:
                    piece[:] = part
                self._bcast_pieces(piece, root)
                start += count

    def alltoall(self, parts: np.ndarray, result: np.ndarray) -> None:
        """Send row r of `parts` (ranks x bytes, uint8) to rank r; row r of `result` is what rank r sent."""
        step = _PIECE // self.size
        with self._payload():
            for start in range(0, parts.shape[1], step):
                sent = np.ascontiguousarray(parts[:, start : start + step])
                received = np.empty_like(sent)
                self.comm.Alltoall(sent, received)
                result[:, start : start + step] = received

    def bcast(self, buffer: np.ndarray, root: int) -> None:
        """Overwrite the uint8 buffer with that of `root`."""
        with self._payload():
            self._bcast_pieces(buffer, root)

    def _bcast_pieces(self, buffer: np.ndarray, root: int) -> None:
        for start in range(0, buffer.size, _PIECE):
            self.comm.Bcast(buffer[start : start + _PIECE], root)
