"""Scaling on paper: formulas against numbers worked out by hand, and what must hold whatever the numbers."""

from __future__ import annotations

import dataclasses

import pytest

from hvdx.comm.algorithms import ALGORITHMS
from hvdx.comm.algorithms.costs import Cluster, Link
from hvdx.errors import ConfigurationError
from hvdx.planning import servers
from hvdx.planning.predict import Job, Prediction, best_all_reduce, predict

FREE = Link(0.0, 0.0)


def cluster(hosts: int, ranks_per_host: int = 1, per_byte: float = 1.0, latency: float = 0.0) -> Cluster:
    return Cluster(hosts, ranks_per_host, Link(latency, per_byte), FREE)


def job(**changes: object) -> Job:
    made = Job(1_000_000, 4, cluster(4, 2, 1e-9, 1e-5), 0.1, 0.0, 4, 1 << 30)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def by_way(of: Job) -> dict[str, Prediction]:
    return {one.way: one for one in predict(of)}


def test_servers_that_each_rank_uses_alone() -> None:
    """8 ranks on 4 hosts, 100 bytes: a host's link carries 200, each of 4 servers' 200, of 2 servers' 400; twice."""
    assert servers.each_rank(cluster(4, 2), 4, 100) == 2 * 200
    assert servers.each_rank(cluster(4, 2), 2, 100) == 2 * 400
    assert servers.each_rank(cluster(4, 2, latency=3.0), 8, 100) == 2 * (3 + 200)
    slow = dataclasses.replace(cluster(4, 2), per_byte_added=5.0)
    assert servers.each_rank(slow, 4, 100) == 200 * 5 + 200


def test_bytepss_formulas() -> None:
    """The table of its paper: all-reduce with no server more, M/B with as many as hosts; between these, in between."""
    of = cluster(8)
    assert servers.each_host(of, 8, 100) == 100
    assert servers.each_host(of, 2, 100) == 8 * 100 / 2
    assert servers.byteps(of, 8, 100) == servers.byteps(of, 20, 100) == 100
    for hosts in (2, 5, 8):
        assert servers.byteps(cluster(hosts), 0, 100) == ALGORITHMS["ring"].seconds(cluster(hosts), 100)
    # Balanced by hand for 4 hosts and 2 servers: a server's share x and a host's share y fill all links alike.
    y = (4 - 2) / (4**2 + 2 * (4 - 2))
    x = (1 - 4 * y) / 2
    assert 4 * x == pytest.approx(1 + (4 - 2) * y)
    assert servers.byteps(cluster(4), 2, 100) == pytest.approx(4 * x * 100)


def test_a_step_by_hand() -> None:
    """4 MB, 8 ranks on 4 hosts, 1 GB/s, 10 us: the ring takes 14 steps of 0.5 MB, 0.51 ms each."""
    ring = by_way(job())["ring"]
    assert ring.exchange_seconds == pytest.approx(14 * (1e-5 + 5e-4))
    assert ring.step_seconds == pytest.approx(0.1 + ring.exchange_seconds)
    assert ring.efficiency == pytest.approx(0.1 / 0.10714)


def test_overlap_hides_what_fits_and_no_more() -> None:
    plain = by_way(job())["ring"]
    half = by_way(job(overlap=0.05))["ring"]
    assert half.step_seconds == pytest.approx(plain.step_seconds - 0.05 * 0.1)
    assert by_way(job(overlap=1.0))["ring"].efficiency == 1.0


def test_buffers_multiply_latencies_and_not_bytes() -> None:
    one, four = by_way(job())["ring"], by_way(job(buffer_bytes=1_000_000))["ring"]
    assert job(buffer_bytes=1_000_000).buffers == 4
    assert four.exchange_seconds == pytest.approx(one.exchange_seconds + 3 * 14 * 1e-5)
    assert job(buffer_bytes=999_999).buffers == 5


def test_what_holds_for_all_ways() -> None:
    for shape in ((1, 1), (1, 4), (4, 1), (4, 2), (16, 8)):
        base = job(cluster=Cluster(*shape, Link(1e-5, 1e-9), Link(1e-6, 1e-10), 1e-10))
        found = predict(base)
        assert [one.exchange_seconds for one in found] == sorted(one.exchange_seconds for one in found)
        assert {one.way for one in found} >= set(ALGORITHMS)
        assert best_all_reduce(found).way in ALGORITHMS
        double = by_way(dataclasses.replace(base, parameters=2_000_000))
        for one in found:
            assert 0 < one.efficiency <= 1
            alone = shape == (1, 1)
            assert (one.exchange_seconds == 0) == alone, one
            assert double[one.way].exchange_seconds >= one.exchange_seconds


def test_a_step_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must take longer than 0 s"):
        job(step_seconds=0.0)
