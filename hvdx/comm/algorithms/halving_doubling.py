"""Halving and doubling: in step k a rank keeps one half of what it had and gives the other to a partner; then back.

First the vector is halved log2 N times while the distance doubles, so that in the end each rank holds the sum of one
part; then the same steps are gone backwards to gather the parts. As few bytes as the ring, in 2 log2 N steps: the
choice for long buffers on many ranks. The longest messages go to the nearest ranks.

R. Rabenseifner: "Optimization of collective reduction operations", ICCS 2004; R. Thakur, R. Rabenseifner, W. Gropp:
"Optimization of collective communication operations in MPICH", International Journal of High Performance Computing
Applications 19(1), 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdx.comm.algorithms import fold
from hvdx.comm.algorithms.channel import Channel, exchange_and_reduce
from hvdx.comm.algorithms.costs import Cluster


def all_reduce(buffer: np.ndarray, op: np.ufunc, channel: Channel) -> None:
    """Reduce the ranks' buffers into each of them; collective. For arguments see `ring.all_reduce`."""
    size = channel.size
    fold.by_halves(buffer, op, channel)
    place = fold.place(channel.rank, size)
    if place is not None:
        steps = _halvings(place, fold.power(size), buffer.size)
        for distance, kept, given in steps:
            partner = fold.rank_at(place ^ distance, size)
            exchange_and_reduce(
                channel, buffer[given], partner, buffer[kept], partner, op, mine_first=not place & distance
            )
        for distance, kept, given in reversed(steps):
            partner = fold.rank_at(place ^ distance, size)
            channel.sendrecv(buffer[kept], partner, buffer[given], partner)
    fold.back(buffer, channel)


def _halvings(place: int, size: int, count: int) -> list[tuple[int, slice, slice]]:
    """Return for each step the distance of the partner, which half is kept, and which is given."""
    start, stop, distance = 0, count, 1
    steps = []
    while distance < size:
        middle = (start + stop) // 2
        lower, upper = slice(start, middle), slice(middle, stop)
        kept, given = (upper, lower) if place & distance else (lower, upper)
        steps.append((distance, kept, given))
        start, stop = kept.start, kept.stop
        distance *= 2
    return steps


def bytes_sent(rank: int, hosts: Sequence[int], count: int, itemsize: int) -> int:
    """Return the bytes a rank sends: 2 (P-1)/P buffers, exact where halves are uneven.

    A pair of the fold adds one buffer for who sits out, and one and a half for who stays.
    """
    size = len(hosts)
    place, paired = fold.place(rank, size), rank < 2 * (size - fold.power(size))
    if place is None:
        return count * itemsize
    halves = [half for _, *both in _halvings(place, fold.power(size), count) for half in both]
    moved = sum(half.stop - half.start for half in halves)  # one goes when halving, the other when doubling
    return (moved + (count // 2 + count if paired else 0)) * itemsize


def seconds(cluster: Cluster, nbytes: float) -> float:
    """Return how long it takes: 2 log2 P steps with M/2, M/4, ... bytes, of which half add."""
    total, distance = fold.seconds(cluster, nbytes, halved=True), 1
    while distance < fold.power(cluster.ranks):
        part = nbytes / (2 * distance)
        total += 2 * cluster.exchange(part, distance) + part * cluster.per_byte_added
        distance *= 2
    return total
