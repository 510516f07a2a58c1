"""Tree: a binomial tree reduces to rank 0, and the same tree brings the result back.

2 log2 N steps with the whole buffer: slower than recursive doubling for short buffers and than the others for long
ones, but a rank sends to few others and only N-1 messages travel each way, which helps where ranks share a link or a
core.

R. Thakur, R. Rabenseifner, W. Gropp: "Optimization of collective communication operations in MPICH", International
Journal of High Performance Computing Applications 19(1), 2005, sections 4.2 and 4.4.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdx.comm.algorithms.channel import NOTHING, Channel, exchange_and_reduce, send_to_reduce
from hvdx.comm.algorithms.costs import Cluster


def all_reduce(buffer: np.ndarray, op: np.ufunc, channel: Channel) -> None:
    """Reduce the ranks' buffers into each of them; collective. For arguments see `ring.all_reduce`."""
    rank = channel.rank
    parent, children = _relatives(rank, channel.size)
    for child in children:
        exchange_and_reduce(channel, NOTHING, rank, buffer, child, op, mine_first=True)
    if parent is not None:
        send_to_reduce(channel, buffer, parent)
        channel.sendrecv(NOTHING, rank, buffer, parent)
    for child in reversed(children):
        channel.sendrecv(buffer, child, NOTHING, rank)


def _relatives(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Return the parent, and the children with the nearest first: a parent is its child without the lowest bit."""
    children: list[int] = []
    distance = 1
    while distance < size:
        if rank & distance:
            return rank - distance, children
        if rank + distance < size:
            children.append(rank + distance)
        distance *= 2
    return None, children


def bytes_sent(rank: int, hosts: Sequence[int], count: int, itemsize: int) -> int:
    """Return the bytes a rank sends: the buffer once for each child, and once for the parent."""
    parent, children = _relatives(rank, len(hosts))
    return count * itemsize * (len(children) + (parent is not None))


def seconds(cluster: Cluster, nbytes: float) -> float:
    """Return how long it takes: 2 ceil(log2 N) steps with M bytes, of which half add; one rank a host goes outside."""
    total, distance = 0.0, 1
    while distance < cluster.ranks:
        total += 2 * cluster.exchange(nbytes, distance, flows=1) + nbytes * cluster.per_byte_added
        distance *= 2
    return total
