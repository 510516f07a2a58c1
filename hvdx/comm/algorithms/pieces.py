"""Two arrays that pass each other between ranks, in pieces of which some are always on their way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdx.comm.algorithms.channel import Take

WITHIN, BETWEEN = 1 << 20, 1 << 17
"""Bytes of a message between ranks of one host, and of two. Between hosts, long messages of several pairs of ranks
that share a link take turns: at times, one direction is idle while the other is in use."""

WINDOW = 1 << 21
"""Bytes that are on their way at a time, each way."""

_TAG = 1
_SPIN_SECONDS, _PAUSE_SECONDS = 50e-6, 50e-6
_abandoned: list[Any] = []
"""What MPI may still write to or read from after a call that was broken off; kept for good."""


@dataclass(frozen=True)
class Peer:
    """The other end of one direction.

    Args:
        rank: its number in the communicator.
        near: whether it is on this host. Who waits for another host sleeps in between: MPI would hold a core.
    """

    rank: int
    near: bool

    @property
    def piece(self) -> int:
        """Bytes of one message, the same at both ends."""
        return WITHIN if self.near else BETWEEN

    @property
    def pieces(self) -> int:
        """How many of them are on their way."""
        return max(1, WINDOW // self.piece)

    def wait(self, request: Any) -> None:
        """Return when a message to or from it is done."""
        if self.near:
            request.Wait()
            return
        end = time.perf_counter() + _SPIN_SECONDS
        while not request.Test():
            if time.perf_counter() > end:
                time.sleep(_PAUSE_SECONDS)


def slots(count: int, dtype: np.dtype[Any], source: Peer) -> list[np.ndarray]:
    """Return memory for the pieces of `count` numbers that are on their way at a time."""
    step = source.piece // dtype.itemsize
    return [np.empty(min(step, count), dtype) for _ in range(min(source.pieces, -(-count // step)))]


def exchange(
    comm: Any,
    send: np.ndarray,
    destination: Peer,
    into: Sequence[np.ndarray],
    count: int,
    source: Peer,
    take: Take | None = None,
) -> None:
    """Send an array while another comes; the ends must be told the same.

    Args:
        comm: an mpi4py communicator that nothing else uses for messages between two ranks.
        send, destination: what goes to whom.
        into: the array for what comes; with `take`, its `slots`, which are used in turn.
        count, source: how many numbers come from whom.
        take: gets a piece when as much of `send` has left.
    """
    outgoing = _Outgoing(comm, send, destination)
    incoming: deque[tuple[Any, np.ndarray]] = deque()
    try:
        outgoing.post()
        step = source.piece // into[0].dtype.itemsize if count else 1
        starts = range(0, count, step)
        posted = 0
        for number, start in enumerate(starts):
            while posted < min(len(starts), number + source.pieces):
                begin, size = starts[posted], min(step, count - starts[posted])
                place = into[posted % len(into)][:size] if take else into[0][begin : begin + size]
                incoming.append((comm.Irecv(place.view(np.uint8), source.rank, _TAG), place))
                posted += 1
            request, came = incoming[0]
            source.wait(request)
            incoming.popleft()
            outgoing.wait_until(start + came.size)
            if take is not None:
                take(start, came)
        outgoing.wait_until(send.size)
    except BaseException:
        _abandoned.append((outgoing, list(incoming), into))
        raise


class _Outgoing:
    """An array on its way to a rank."""

    def __init__(self, comm: Any, send: np.ndarray, destination: Peer) -> None:
        self._comm, self._send, self._destination = comm, send, destination
        self._step = destination.piece // send.dtype.itemsize
        self._requests: deque[Any] = deque()
        self._posted = self._left = 0

    def post(self) -> None:
        """Hand MPI as much as may be on its way."""
        while self._posted < self._send.size and len(self._requests) < self._destination.pieces:
            part = self._send[self._posted : self._posted + self._step]
            self._requests.append(self._comm.Isend(part.view(np.uint8), self._destination.rank, _TAG))
            self._posted += part.size

    def wait_until(self, count: int) -> None:
        """Return when the first `count` numbers have left, or all of them."""
        while self._left < min(count, self._send.size):
            self._destination.wait(self._requests[0])
            self._requests.popleft()
            self._left = min(self._left + self._step, self._send.size)
            self.post()
