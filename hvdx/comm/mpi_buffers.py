"""Moving whole numpy buffers between the ranks of an mpi4py communicator, in pieces that MPI can count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hvdx.comm.algorithms.over_mpi import PIECE, MpiChannel, reduce
from hvdx.comm.reduce_op import ReduceOp


class MpiBuffers:
    """Blocking collectives of one MPI communicator; the ranks have agreed on each call before.

    Args:
        comm: an mpi4py communicator for nothing else.
        payload: gives the context in which every call runs: it watches it, and turns what MPI raises into an error.
        hosts: the name of each rank's host; where it is None, every rank is on one of its own.
        algorithm: how to reduce, a value of HVDX_ALLREDUCE, the same on all ranks.
    """

    def __init__(
        self,
        comm: Any,
        payload: Callable[[], AbstractContextManager[None]],
        hosts: Sequence[str] | None = None,
        algorithm: str = "mpi",
    ) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.algorithm = algorithm
        self._payload = payload
        self._channel = MpiChannel(comm, hosts)

    def reduce(self, buffer: np.ndarray, op: ReduceOp) -> None:
        """Reduce a typed 1-d buffer in place (Sum, Min, Max or Product; never 16-bit floats)."""
        with self._payload():
            reduce(self._channel, buffer, op, self.algorithm)

    def gather(self, part: np.ndarray, counts: Sequence[int], result: np.ndarray) -> None:
        """Put every rank's uint8 `part` (of `counts[rank]` bytes) into `result`, in the order of ranks."""
        with self._payload():
            if sum(counts) <= PIECE:
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
        step = PIECE // self.size
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
        for start in range(0, buffer.size, PIECE):
            self.comm.Bcast(buffer[start : start + PIECE], root)
