"""Ring: the buffer is cut into one part a rank; partial sums go round the ring once, the results once more.

Every rank sends 2 (N-1)/N of the buffer, which no algorithm can do with less, in 2 (N-1) steps: the choice for large
buffers and few ranks.

P. Patarasuk, X. Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel and
Distributed Computing 69(2), 2009; made known for deep learning by A. Gibiansky (Baidu, 2017) and Horovod.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdx.comm.algorithms.channel import Channel, bounds, exchange_and_reduce
from hvdx.comm.algorithms.costs import Cluster, Link


def all_reduce(buffer: np.ndarray, op: np.ufunc, channel: Channel) -> None:
    """Reduce the ranks' buffers into each of them; collective.

    Args:
        buffer: contiguous and 1-d; as long, and of the same dtype, on every rank.
        op: add, minimum, maximum or multiply.
        channel: the way to the others.
    """
    starts = bounds(buffer.size, channel.size)
    reduce_scatter(buffer, op, channel, starts)
    all_gather(buffer, channel, starts)


def reduce_scatter(buffer: np.ndarray, op: np.ufunc, channel: Channel, starts: Sequence[int]) -> None:
    """Reduce part r of the buffers, from `starts[r]` to `starts[r + 1]`, on rank r; the other parts are lost."""
    size, rank = channel.size, channel.rank
    for step in range(1, size):
        going, coming = (rank - step) % size, (rank - step - 1) % size
        exchange_and_reduce(
            channel,
            buffer[starts[going] : starts[going + 1]],
            (rank + 1) % size,
            buffer[starts[coming] : starts[coming + 1]],
            (rank - 1) % size,
            op,
            mine_first=False,
        )


def all_gather(buffer: np.ndarray, channel: Channel, starts: Sequence[int]) -> None:
    """Give every rank part r of rank r's buffer."""
    size, rank = channel.size, channel.rank
    for step in range(size - 1):
        going, coming = (rank - step) % size, (rank - step - 1) % size
        channel.sendrecv(
            buffer[starts[going] : starts[going + 1]],
            (rank + 1) % size,
            buffer[starts[coming] : starts[coming + 1]],
            (rank - 1) % size,
        )


def bytes_sent(rank: int, hosts: Sequence[int], count: int, itemsize: int) -> int:
    """Return the bytes a rank sends for `count` numbers: 2 (N-1)/N of the buffer, exact where parts are uneven.

    In the first round a rank passes on all parts but its own, in the second all but its right neighbour's.
    """
    size = len(hosts)
    if size == 1:
        return 0
    starts = bounds(count, size)
    right = (rank + 1) % size
    own, neighbours = starts[rank + 1] - starts[rank], starts[right + 1] - starts[right]
    return (2 * count - own - neighbours) * itemsize


def seconds(cluster: Cluster, nbytes: float) -> float:
    """Return how long it takes: 2 (N-1) steps with M/N bytes, of which half add; the slowest link sets the pace.

    One message enters and one leaves each host at a time, so ranks of a host do not get in each other's way.
    """
    links = ([cluster.within] if cluster.ranks_per_host > 1 else []) + ([cluster.between] if cluster.hosts > 1 else [])
    part = nbytes / cluster.ranks
    step = max((link.seconds(part) for link in links), default=0.0)
    return (cluster.ranks - 1) * (2 * step + part * cluster.per_byte_added)


def round_seconds(link: Link, ranks: int, nbytes: float) -> float:
    """Return how long one round (reduce-scatter without its additions, or all-gather) takes on one kind of link."""
    return (ranks - 1) * link.seconds(nbytes / ranks)
