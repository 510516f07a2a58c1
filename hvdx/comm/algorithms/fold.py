"""Any number of ranks, for algorithms that need a power of two: some ranks give their numbers to a neighbour first.

Of N = P + R ranks, P the largest power of two, the first 2R form pairs; the even one of a pair sits out, and gets the
result in the end. Described by Thakur, Rabenseifner, Gropp (see `halving_doubling.py`).
"""

from __future__ import annotations

import numpy as np

from hvdx.comm.algorithms.channel import NOTHING, Channel, exchange_and_reduce, send_to_reduce
from hvdx.comm.algorithms.costs import Cluster


def power(size: int) -> int:
    """Return the largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def place(rank: int, size: int) -> int | None:
    """Return a rank's number among those that stay, or None where it sits out."""
    extra = size - power(size)
    if rank >= 2 * extra:
        return rank - extra
    return rank // 2 if rank % 2 else None


def rank_at(place: int, size: int) -> int:
    """Return the rank with this number among those that stay."""
    extra = size - power(size)
    return 2 * place + 1 if place < extra else place + extra


def _in_pair(channel: Channel) -> bool:
    return channel.rank < 2 * (channel.size - power(channel.size))


def whole(buffer: np.ndarray, op: np.ufunc, channel: Channel) -> None:
    """Reduce each pair's buffers on its odd rank: one message, for short buffers."""
    if not _in_pair(channel):
        return
    if channel.rank % 2:
        exchange_and_reduce(channel, NOTHING, channel.rank, buffer, channel.rank - 1, op, mine_first=False)
    else:
        send_to_reduce(channel, buffer, channel.rank + 1)


def by_halves(buffer: np.ndarray, op: np.ufunc, channel: Channel) -> None:
    """Do the same, but each rank of a pair adds one half: two messages of half the length, for long buffers."""
    if not _in_pair(channel):
        return
    lower, upper = buffer[: buffer.size // 2], buffer[buffer.size // 2 :]
    if channel.rank % 2:
        even = channel.rank - 1
        exchange_and_reduce(channel, lower, even, upper, even, op, mine_first=False)
        channel.sendrecv(NOTHING, even, lower, even)
    else:
        odd = channel.rank + 1
        exchange_and_reduce(channel, upper, odd, lower, odd, op, mine_first=True)
        channel.sendrecv(lower, odd, NOTHING, odd)


def back(buffer: np.ndarray, channel: Channel) -> None:
    """Give the result to those who sat out."""
    if not _in_pair(channel):
        return
    if channel.rank % 2:
        channel.sendrecv(buffer, channel.rank - 1, NOTHING, channel.rank)
    else:
        channel.sendrecv(NOTHING, channel.rank, buffer, channel.rank + 1)


def seconds(cluster: Cluster, nbytes: float, *, halved: bool) -> float:
    """Return how long `whole` or `by_halves` takes together with `back`."""
    if power(cluster.ranks) == cluster.ranks:
        return 0.0
    message = cluster.exchange(nbytes, 1)
    if halved:
        return 2 * cluster.exchange(nbytes / 2, 1) + nbytes / 2 * cluster.per_byte_added + message
    return 2 * message + nbytes * cluster.per_byte_added
