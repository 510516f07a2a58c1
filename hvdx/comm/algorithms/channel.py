"""What the algorithms ask of the network: send an array to one rank while one comes from another."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import numpy as np

NOTHING = np.empty(0, np.uint8)
"""For a step in which a rank only sends, or only receives."""

SEGMENT = 1 << 20
"""Bytes that are received before they are reduced: they are still in the cache then, and need no more scratch."""


Take = Callable[[int, np.ndarray], None]
"""Gets the index of the first of some numbers that came, and the numbers, which are gone when it returns."""


class Channel(abc.ABC):
    """One rank's way to the others.

    Args:
        rank: this rank.
        hosts: for each rank, the number of the host it is on; hosts count from 0 in the order of their first ranks.
    """

    def __init__(self, rank: int, hosts: Sequence[int]) -> None:
        self.rank = rank
        self.hosts = tuple(hosts)
        self.bytes_sent = 0

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)

    def sendrecv(self, send: np.ndarray, destination: int, receive: np.ndarray, source: int) -> None:
        """Send one contiguous array and fill another; returns when both are done.

        What is empty does not travel: its other end, where it is empty too, does not wait for it.
        """
        self.bytes_sent += send.nbytes
        if send.size or receive.size:
            self._move(send, destination, receive, source)

    def exchange(self, send: np.ndarray, destination: int, count: int, source: int, take: Take) -> None:
        """Send one contiguous array while another of the same dtype comes, and is taken in segments, in their order.

        Args:
            send: it may be changed by `take`, up to where what is taken ends.
            destination: who gets it; it must call this method, too.
            count: how many numbers come.
            source: who sends them, by this method.
            take: gets what came, as soon as as many numbers of `send` have left.
        """
        self.bytes_sent += send.nbytes
        if send.size or count:
            self._exchange(send, destination, count, source, take)

    def _exchange(self, send: np.ndarray, destination: int, count: int, source: int, take: Take) -> None:
        step = max(1, SEGMENT // send.dtype.itemsize)
        scratch = np.empty(min(step, count), send.dtype)
        for start in range(0, max(send.size, count), step):
            received = scratch[: max(0, min(step, count - start))]
            self._move(send[start : start + step], destination, received, source)
            if received.size:
                take(start, received)

    @abc.abstractmethod
    def _move(self, send: np.ndarray, destination: int, receive: np.ndarray, source: int) -> None:
        """Do it; `send` or `receive`, but not both, may be empty, and its peer must not be looked at then."""


class Group(Channel):
    """Some of a channel's ranks, numbered from 0 in the order given.

    Args:
        channel: that of all ranks; it counts what is sent, too.
        members: the group's ranks, this one among them; all must be given the same.
    """

    def __init__(self, channel: Channel, members: Sequence[int]) -> None:
        super().__init__(members.index(channel.rank), [channel.hosts[member] for member in members])
        self._channel = channel
        self._members = tuple(members)

    def _move(self, send: np.ndarray, destination: int, receive: np.ndarray, source: int) -> None:
        self._channel.sendrecv(send, self._members[destination], receive, self._members[source])

    def _exchange(self, send: np.ndarray, destination: int, count: int, source: int, take: Take) -> None:
        self._channel.exchange(send, self._members[destination], count, self._members[source], take)


def exchange_and_reduce(
    channel: Channel,
    send: np.ndarray,
    destination: int,
    mine: np.ndarray,
    source: int,
    op: np.ufunc,
    *,
    mine_first: bool,
) -> None:
    """Send one array and reduce the one that comes into `mine`, a segment at a time; the others must do so, too.

    Args:
        channel: the way to the others.
        send: what the destination gets; it may be `mine` itself, which goes out as it was.
        destination: who gets it.
        mine: what is reduced, in place.
        source: who sends as many numbers as `mine` has.
        op: the operation.
        mine_first: whether `mine` is the left operand. Both orders give the same sum, but not the same minimum of
            0.0 and -0.0, nor the same NaN; with one order for all, all ranks hold the same bits.
    """

    def take(start: int, received: np.ndarray) -> None:
        target = mine[start : start + received.size]
        left, right = (target, received) if mine_first else (received, target)
        op(left, right, out=target)

    channel.exchange(send if send.size else mine[:0], destination, mine.size, source, take)


def send_to_reduce(channel: Channel, send: np.ndarray, destination: int) -> None:
    """Send an array to a rank that reduces it by `exchange_and_reduce` and sends nothing itself."""
    channel.exchange(send, destination, 0, channel.rank, lambda start, received: None)


def bounds(count: int, parts: int) -> list[int]:
    """Return where the parts of `count` numbers begin, and the end; the first ones are longer by one where needed."""
    whole, rest = divmod(count, parts)
    return [part * whole + min(part, rest) for part in range(parts + 1)]
