"""The algorithms on MPI, and the choice between them and MPI's own all-reduce."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdx.comm.algorithms import ALGORITHMS, measured
from hvdx.comm.algorithms.channel import Channel, Take
from hvdx.comm.mpi_library import MPI
from hvdx.comm.reduce_op import UFUNCS, ReduceOp
from hvdx.errors import MismatchError

PIECE = 1 << 30
"""Bytes in one MPI call; MPI counts elements in 32 bits."""

TUNABLE = ("mpi", "ring", "halving_doubling", "recursive_doubling", "hierarchical")
"""What a search tries; a tree is slower than one of these for every length."""

WITHIN, BETWEEN = 1 << 20, 1 << 17
"""Bytes of a message between ranks of one host, and of two. Between hosts, long messages of several pairs of ranks
that share a link take turns: at times, one direction is idle while the other is in use."""

WINDOW = 1 << 21
"""Bytes that are on their way at a time, each way."""

_MPI_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX, ReduceOp.PRODUCT: MPI.PROD}
_TAG = 1


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
        self._in_pieces(send, destination, [receive], receive.size, source, None)

    def _exchange(self, send: np.ndarray, destination: int, count: int, source: int, take: Take) -> None:
        step = self._piece(source) // send.dtype.itemsize
        slots = [
            np.empty(min(step, count), send.dtype) for _ in range(min(WINDOW // self._piece(source), -(-count // step)))
        ]
        self._in_pieces(send, destination, slots, count, source, take)

    def _piece(self, peer: int) -> int:
        """Return how many bytes to and from a rank are one message; both come to the same."""
        return WITHIN if self.hosts[peer] == self.hosts[self.rank] else BETWEEN

    def _in_pieces(
        self,
        send: np.ndarray,
        destination: int,
        slots: Sequence[np.ndarray],
        count: int,
        source: int,
        take: Take | None,
    ) -> None:
        """Keep WINDOW bytes each way on their way, so that neither direction of a link waits for the other.

        Args:
            send, destination: what goes to whom.
            slots: where pieces are received, in turn, to be taken; without `take`, the array for all of them.
            count, source: how many numbers come from whom.
            take: gets a piece when as much of `send` has left.
        """
        outgoing, incoming = _Outgoing(self.comm, send, destination, self._piece(destination)), deque[Any]()
        step = self._piece(source) // slots[0].dtype.itemsize if slots else 1
        starts = range(0, count, step)
        posted = 0
        for start in starts:
            while posted < min(len(starts), start // step + max(1, WINDOW // self._piece(source))):
                begin = starts[posted]
                size = min(step, count - begin)
                into = slots[0][begin : begin + size] if take is None else slots[posted % len(slots)][:size]
                incoming.append((self.comm.Irecv(into.view(np.uint8), source, _TAG), into))
                posted += 1
            request, into = incoming.popleft()
            request.Wait()
            outgoing.wait_until(start + into.size)
            if take is not None:
                take(start, into)
        outgoing.wait_until(send.size)

    def best(self, nbytes: int) -> str:
        """Return what `auto` uses for a buffer of this length: the same on all ranks."""
        return measured.choose(self._thresholds, nbytes)


class _Outgoing:
    """An array on its way to a rank, of which WINDOW bytes at a time are in MPI's hands."""

    def __init__(self, comm: Any, send: np.ndarray, destination: int, piece: int) -> None:
        self._comm, self._send, self._destination = comm, send, destination
        self._step = piece // send.dtype.itemsize
        self._limit = max(1, WINDOW // piece)
        self._requests: deque[Any] = deque()
        self._posted = self._left = 0
        self._post()

    def _post(self) -> None:
        while self._posted < self._send.size and len(self._requests) < self._limit:
            part = self._send[self._posted : self._posted + self._step]
            self._requests.append(self._comm.Isend(part.view(np.uint8), self._destination, _TAG))
            self._posted += part.size

    def wait_until(self, count: int) -> None:
        """Return when the first `count` numbers have left, or all of them."""
        while self._left < min(count, self._send.size):
            self._requests.popleft().Wait()
            self._left = min(self._left + self._step, self._send.size)
            self._post()


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
