"""The algorithms on MPI, and the choice between them and MPI's own all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdx.comm.algorithms import ALGORITHMS, measured, pieces
from hvdx.comm.algorithms.channel import Channel, Take
from hvdx.comm.mpi_library import MPI
from hvdx.comm.reduce_op import UFUNCS, ReduceOp
from hvdx.errors import MismatchError

PIECE = 1 << 30
"""Bytes in one MPI call; MPI counts elements in 32 bits."""

TUNABLE = ("auto", "ring", "halving_doubling", "recursive_doubling", "hierarchical")
"""What a search tries. Where a tree was the fastest for some lengths, `auto` knows it."""

_MPI_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX, ReduceOp.PRODUCT: MPI.PROD}


class MpiChannel(Channel):
    """The ranks of an mpi4py communicator.

    Args:
        comm: nothing else may use it for messages between two ranks; collectives do not get in the way.
        hosts: the name of each rank's host; where it is None, every rank is on one of its own.
    """

    def __init__(self, comm: Any, hosts: Sequence[str] | None = None) -> None:
        numbers: dict[str, int] = {}
        of_ranks = range(comm.Get_size()) if hosts is None else [numbers.setdefault(h, len(numbers)) for h in hosts]
        super().__init__(comm.Get_rank(), of_ranks)
        self.comm = comm
        self._thresholds = measured.lookup(MPI.get_vendor()[0], measured.ranks_per_host(self.hosts))

    def _move(self, send: np.ndarray, destination: int, receive: np.ndarray, source: int) -> None:
        pieces.exchange(self.comm, send, self._peer(destination), [receive], receive.size, self._peer(source))

    def _exchange(self, send: np.ndarray, destination: int, count: int, source: int, take: Take) -> None:
        comes_from = self._peer(source)
        into = pieces.slots(count, send.dtype, comes_from)
        pieces.exchange(self.comm, send, self._peer(destination), into, count, comes_from, take)

    def _peer(self, rank: int) -> pieces.Peer:
        return pieces.Peer(rank, self.hosts[rank] == self.hosts[self.rank])

    def best(self, nbytes: int) -> str:
        """Return what `auto` uses for a buffer of this length: the same on all ranks."""
        return measured.choose(self._thresholds, nbytes)


def reduce(channel: MpiChannel, buffer: np.ndarray, op: ReduceOp, choice: str) -> None:
    """Reduce the ranks' buffers into each of them; collective.

    Args:
        channel: the ranks that take part.
        buffer: contiguous, 1-d, as long and of the same dtype on every rank; any but 16-bit floats.
        op: Sum, Min, Max or Product.
        choice: a value of HVDX_ALLREDUCE, the same on every rank.

    Raises:
        MPI.Exception: MPI failed.
    """
    if not buffer.size or channel.size == 1:
        return
    name = channel.best(buffer.nbytes) if choice == "auto" else choice
    if name == "mpi":
        step = PIECE // buffer.dtype.itemsize
        for start in range(0, buffer.size, step):
            channel.comm.Allreduce(MPI.IN_PLACE, buffer[start : start + step], _MPI_OPS[op])
        return
    with np.errstate(all="ignore"):  # as MPI: an overflow is an infinity, of which nobody is warned here
        ALGORITHMS[name].all_reduce(buffer, UFUNCS[op], channel)


def check_choices(choices: Sequence[str]) -> None:
    """Check that all ranks were told the same algorithm, since ranks with different ones would wait for each other.

    Args:
        choices: each rank's HVDX_ALLREDUCE.

    Raises:
        MismatchError: they differ; raised on every rank.
    """
    if len(set(choices)) > 1:
        raise MismatchError(
            f"The ranks' reduction algorithms differ: {', '.join(choices)} on ranks 0, 1, ... "
            "Give all ranks the same HVDX_ALLREDUCE."
        )
