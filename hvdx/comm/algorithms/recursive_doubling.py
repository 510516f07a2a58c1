"""Recursive doubling: in step k every rank exchanges its whole buffer with the one at distance 2^k, and both add.

log2 N steps are the fewest there can be, and each moves the whole buffer: the choice for short buffers.

R. Thakur, R. Rabenseifner, W. Gropp: "Optimization of collective communication operations in MPICH", International
Journal of High Performance Computing Applications 19(1), 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdx.comm.algorithms import fold
from hvdx.comm.algorithms.channel import Channel, exchange_and_reduce
from hvdx.comm.algorithms.costs import Cluster


def all_reduce(buffer: np.ndarray, op: np.ufunc, channel: Channel) -> None:
    """Reduce the ranks' buffers into each of them; collective. For arguments see `ring.all_reduce`."""
    fold.whole(buffer, op, channel)
    place = fold.place(channel.rank, channel.size)
    if place is not None:
        distance = 1
        while distance < fold.power(channel.size):
            partner = fold.rank_at(place ^ distance, channel.size)
            exchange_and_reduce(channel, buffer, partner, buffer, partner, op, mine_first=not place & distance)
            distance *= 2
    fold.back(buffer, channel)


def bytes_sent(rank: int, hosts: Sequence[int], count: int, itemsize: int) -> int:
    """Return the bytes a rank sends: log2 P buffers; one more in a pair of the fold, and one alone for who sits out."""
    size = len(hosts)
    steps = fold.power(size).bit_length() - 1
    place, paired = fold.place(rank, size), rank < 2 * (size - fold.power(size))
    return count * itemsize * ((0 if place is None else steps) + paired)


def seconds(cluster: Cluster, nbytes: float) -> float:
    """Return how long it takes: log2 P steps with M bytes; between hosts, all ranks of a host share its link."""
    total, distance = fold.seconds(cluster, nbytes, halved=False), 1
    while distance < fold.power(cluster.ranks):
        total += cluster.exchange(nbytes, distance) + nbytes * cluster.per_byte_added
        distance *= 2
    return total
