"""What synchronous parameter servers cost: push the gradients, let the servers add, pull the result.

Servers stand on machines of their own, whose links are those of the workers' hosts; they add while they receive. All
functions return seconds, for gradients of `nbytes`.

M. Li et al.: "Scaling distributed machine learning with the parameter server", OSDI 2014; Y. Jiang et al.: "A unified
architecture for accelerating distributed DNN training in heterogeneous GPU/CPU clusters" (BytePS), OSDI 2020.
"""

from __future__ import annotations

from hvdx.comm.algorithms import ring
from hvdx.comm.algorithms.costs import Cluster


def each_rank(cluster: Cluster, servers: int, nbytes: float) -> float:
    """Every rank pushes, then pulls, by itself: so do hvdx's servers.

    The ranks of a host share its link, and all ranks the servers' links: whichever has more to carry sets the pace.
    """
    if cluster.ranks == 1:
        return 0.0
    of_server = cluster.ranks * nbytes / servers
    busiest = max(cluster.ranks_per_host * nbytes, of_server)
    pull = cluster.between.seconds(busiest)
    return max(pull, of_server * cluster.per_byte_added) + pull


def each_host(cluster: Cluster, servers: int, nbytes: float) -> float:
    """The ranks of a host reduce first, and one buffer a host is pushed and pulled, in both directions at once.

    This is the best that servers can do: BytePS's "non-colocated" formula, max(M / B, n M / (k B)), with the reduction
    within the host by a ring.
    """
    if cluster.ranks == 1:
        return 0.0
    within = inside(cluster, nbytes)
    if cluster.hosts == 1:
        return within
    of_server = cluster.hosts * nbytes / servers
    busiest = max(nbytes * cluster.between.per_byte, of_server * max(cluster.between.per_byte, cluster.per_byte_added))
    return within + 2 * cluster.between.latency + busiest


def byteps(cluster: Cluster, servers: int, nbytes: float) -> float:
    """Hosts work as servers too, with just as much of the sum that all links are equally busy: BytePS's bound.

    2 n (n-1) M / ((n^2 + k n - 2 k) B) for n hosts and k <= n servers: the all-reduce's 2 (n-1)/n M / B without
    servers, and M / B with as many as hosts.
    """
    hosts, extra = cluster.hosts, min(servers, cluster.hosts)
    within = inside(cluster, nbytes)
    if hosts == 1:
        return within
    moved = 2 * hosts * (hosts - 1) * nbytes / (hosts**2 + extra * hosts - 2 * extra)
    return within + 2 * cluster.between.latency + moved * cluster.between.per_byte


def inside(cluster: Cluster, nbytes: float) -> float:
    """Return the seconds of a reduce-scatter and an all-gather within each host."""
    local = cluster.ranks_per_host
    added = (local - 1) * nbytes / local * cluster.per_byte_added
    return 2 * ring.round_seconds(cluster.within, local, nbytes) + added
