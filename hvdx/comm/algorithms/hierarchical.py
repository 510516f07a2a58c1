"""Hierarchical: the ranks of a host share the buffer out, each reduces its part with the other hosts, and back.

A ring reduces within each host (rank i of a host then holds part i of the host's sum), the ranks with the same i on
all hosts all-reduce their part, and a ring gathers the parts within each host. Between hosts only 2 (H-1)/H of one
buffer a host travels, with few steps; the choice where ranks of one host are near and hosts are far.

So does Horovod's HOROVOD_HIERARCHICAL_ALLREDUCE; see also X. Jia et al.: "Highly scalable deep learning training system
with mixed-precision", 2018, section 3.3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from hvdx.comm.algorithms import fold, halving_doubling, ring
from hvdx.comm.algorithms.channel import Channel, Group, bounds
from hvdx.comm.algorithms.costs import Cluster, Link


def all_reduce(buffer: np.ndarray, op: np.ufunc, channel: Channel) -> None:
    """Reduce the ranks' buffers into each of them; collective. For arguments see `ring.all_reduce`.

    Hosts may have unequal numbers of ranks: there are as many parts as the smallest host has ranks, and on a larger
    host some ranks hold none.
    """
    by_host = _ranks_by_host(channel.hosts)
    mine = by_host[channel.hosts[channel.rank]]
    local = Group(channel, mine)
    starts = _starts(by_host, local.size, buffer.size)
    ring.reduce_scatter(buffer, op, local, starts)
    if local.rank < _parts(by_host):
        across = Group(channel, [ranks[local.rank] for ranks in by_host])
        _across(len(by_host)).all_reduce(buffer[starts[local.rank] : starts[local.rank + 1]], op, across)
    ring.all_gather(buffer, local, starts)


@functools.lru_cache(maxsize=64)
def _ranks_by_host(hosts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    ranks: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
    for rank, host in enumerate(hosts):
        ranks[host].append(rank)
    return tuple(map(tuple, ranks))


def _parts(by_host: Sequence[Sequence[int]]) -> int:
    return min(map(len, by_host))


def _starts(by_host: Sequence[Sequence[int]], local_size: int, count: int) -> list[int]:
    starts = bounds(count, _parts(by_host))
    return starts + [count] * (local_size - _parts(by_host))


def _across(hosts: int) -> ModuleType:
    """Return the algorithm between hosts: both send as little as can be, one is faster, the other has no fold."""
    return halving_doubling if fold.power(hosts) == hosts else ring


def bytes_sent(rank: int, hosts: Sequence[int], count: int, itemsize: int) -> int:
    """Return the bytes a rank sends: those of a ring in its host, and of an all-reduce of its part between hosts."""
    by_host = _ranks_by_host(tuple(hosts))
    local_size = len(by_host[hosts[rank]])
    index = by_host[hosts[rank]].index(rank)
    starts = _starts(by_host, local_size, count)
    right = (index + 1) % local_size
    own = starts[index + 1] - starts[index]
    total = 0
    if local_size > 1:
        total += (2 * count - own - (starts[right + 1] - starts[right])) * itemsize
    if index < _parts(by_host):
        total += _across(len(by_host)).bytes_sent(hosts[rank], range(len(by_host)), own, itemsize)
    return total


def seconds(cluster: Cluster, nbytes: float) -> float:
    """Return how long it takes: the ring's two rounds within a host, and between hosts M/L bytes on each of L ranks.

    The ranks of a host share its link, so that together they move M bytes as one rank would.
    """
    local, hosts = cluster.ranks_per_host, cluster.hosts
    part = nbytes / local
    inside = 2 * ring.round_seconds(cluster.within, local, nbytes) + (local - 1) * part * cluster.per_byte_added
    shared = Link(cluster.between.latency, local * cluster.between.per_byte)
    return inside + _across(hosts).seconds(Cluster.flat(hosts, shared, cluster.per_byte_added), part)
