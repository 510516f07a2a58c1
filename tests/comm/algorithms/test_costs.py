"""The cost models against clocks: each rank's clock runs while the algorithm itself moves messages and adds."""

from __future__ import annotations

import numpy as np
import pytest

from hvdx.comm.algorithms import ALGORITHMS, channel
from hvdx.comm.algorithms.costs import Cluster, Link
from hvdx.comm.algorithms.simulation import SimulatedChannel, simulate

FAR, NEAR, ADDED = Link(7.0, 0.5), Link(1.0, 0.125), 0.03125
LENGTH = 5040
"""Numbers in the buffer: parts are even for every number of ranks used here."""


def clock(name: str, cluster: Cluster) -> float:
    """Return when the last rank is done."""

    def run(channel: SimulatedChannel) -> None:
        ALGORITHMS[name].all_reduce(np.ones(LENGTH, np.uint8), channel.add, channel)

    hosts = [rank // cluster.ranks_per_host for rank in range(cluster.ranks)]
    return max(channel.clock for channel in simulate(hosts, run, cluster)[1])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_a_host(name: str) -> None:
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 9):
        cluster = Cluster.flat(size, FAR, ADDED)
        assert clock(name, cluster) == pytest.approx(ALGORITHMS[name].seconds(cluster, LENGTH), rel=2e-3), size


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_ranks_on_one_host(name: str) -> None:
    for size in (2, 3, 4, 8):
        cluster = Cluster(1, size, FAR, NEAR, ADDED)
        assert clock(name, cluster) == pytest.approx(ALGORITHMS[name].seconds(cluster, LENGTH), rel=2e-3), size


@pytest.mark.parametrize("name", ["ring", "tree"])
def test_several_hosts_where_one_rank_at_a_time_uses_the_link(name: str) -> None:
    for hosts, local in ((2, 2), (2, 4), (4, 2)):
        cluster = Cluster(hosts, local, FAR, NEAR, ADDED)
        assert clock(name, cluster) == pytest.approx(ALGORITHMS[name].seconds(cluster, LENGTH), rel=2e-3)


def test_ranks_of_a_host_share_its_link() -> None:
    """Worked out by hand: 2 hosts of 2 ranks, 1000 bytes, additions free."""
    cluster = Cluster(2, 2, FAR, NEAR)
    near = 1 + 1000 * 0.125
    assert ALGORITHMS["recursive_doubling"].seconds(cluster, 1000) == near + (7 + 2 * 1000 * 0.5)
    assert ALGORITHMS["halving_doubling"].seconds(cluster, 1000) == 2 * (1 + 500 * 0.125) + 2 * (7 + 2 * 250 * 0.5)
    assert ALGORITHMS["hierarchical"].seconds(cluster, 1000) == 2 * (1 + 500 * 0.125) + 2 * (7 + 2 * 250 * 0.5)
    assert ALGORITHMS["ring"].seconds(cluster, 1000) == 6 * (7 + 250 * 0.5)


def test_what_is_best_where() -> None:
    """Thakur, Rabenseifner and Gropp's finding: few steps for short buffers, few bytes for long ones."""
    cluster = Cluster.flat(16, Link(10e-6, 1 / 3e9), 1 / 10e9)

    def best(nbytes: float) -> str:
        flat = [name for name in ALGORITHMS if name != "hierarchical"]  # with one rank a host it is one of the others
        return min(flat, key=lambda name: ALGORITHMS[name].seconds(cluster, nbytes))

    assert best(64) == "recursive_doubling"
    assert best(1 << 20) == "halving_doubling"
    odd = Cluster.flat(6, Link(10e-6, 1 / 3e9), 1 / 10e9)
    assert ALGORITHMS["ring"].seconds(odd, 1 << 26) < ALGORITHMS["halving_doubling"].seconds(odd, 1 << 26)


def test_a_segment_is_one_message_in_these_tests() -> None:
    assert channel.SEGMENT > LENGTH
