"""Every algorithm against numpy, for any number of ranks and any length, and the exact number of bytes sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hvdx import environment
from hvdx.comm.algorithms import ALGORITHMS, channel
from hvdx.comm.algorithms.costs import Cluster, Link
from hvdx.comm.algorithms.simulation import SimulatedChannel, simulate

OPS = [np.add, np.minimum, np.maximum, np.multiply]
FREE = Cluster.flat(1, Link(0.0, 0.0))
LENGTHS = [0, 1, 2, 3, 5, 8, 13, 64, 1001]
HOSTS = [
    [0] * 4,
    [0, 0, 1, 1],
    [0, 1, 0, 1],
    [0, 0, 0, 1],
    [0, 0, 1, 1, 2, 2],
    [0, 1, 1, 1, 2, 2, 2, 2],
    [0, 0, 0, 1, 1, 1, 2, 2, 2],
    [0, 1, 2, 3, 4],
]
"""Equal and unequal hosts, ranks host by host and dealt out in turn."""


def numbers(rank: int, length: int, dtype: str) -> np.ndarray:
    """Return numbers that differ between ranks, with signed zeros and an infinity among the floats."""
    values = np.random.default_rng(rank).integers(1, 4, length).astype(dtype)
    if values.dtype.kind in "fc":
        values = values + np.random.default_rng(100 + rank).normal(size=length).astype(dtype)
        values[::7] = (-1.0) ** rank * 0.0
        values[3::11] = np.inf if rank == 1 else 1.0
    return values


def check(name: str, hosts: Sequence[int], length: int, op: np.ufunc, dtype: str) -> list[int]:
    """Run it and compare; return the bytes that each rank sent."""

    def run(channel: SimulatedChannel) -> np.ndarray:
        buffer = numbers(channel.rank, length, dtype)
        ALGORITHMS[name].all_reduce(buffer, op, channel)
        return buffer

    results, channels = simulate(hosts, run, FREE)
    reference = op.reduce([numbers(rank, length, dtype) for rank in range(len(hosts))], dtype=dtype)
    about = f"{name}, hosts {hosts}, {length} numbers, {op.__name__} of {dtype}"
    if reference.dtype.kind in "iu":
        np.testing.assert_array_equal(results[0], reference, about)
    else:
        np.testing.assert_allclose(results[0], reference, rtol=1e-5, atol=1e-6, err_msg=about)
    assert len({result.tobytes() for result in results}) == 1, f"bits differ between ranks: {about}"
    sent = [one.bytes_sent for one in channels]
    item = np.dtype(dtype).itemsize
    formula = [ALGORITHMS[name].bytes_sent(rank, hosts, length, item) for rank in range(len(hosts))]
    assert sent == formula, about
    return sent


@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_number_of_ranks_any_length_against_numpy(name: str) -> None:
    for size in range(1, 10):
        for index, length in enumerate(LENGTHS):
            check(name, [0] * size, length, OPS[(index + size) % 4], "int64")
            check(name, list(range(size)), length, OPS[(index + size + 1) % 4], "float32")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_operations_and_kinds_of_numbers(name: str) -> None:
    for size in (2, 3, 6):
        for op in OPS:
            for dtype in ("uint8", "int32", "float64"):
                check(name, [0] * size, 29, op, dtype)
        check(name, [0] * size, 29, np.add, "complex64")


def test_hierarchical_on_equal_and_unequal_hosts() -> None:
    for hosts in HOSTS:
        for length in LENGTHS:
            for op in OPS:
                check("hierarchical", hosts, length, op, "float32")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_buffers_longer_than_a_segment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes is reduced a segment at a time; parts that are uneven need unequal numbers of segments."""
    monkeypatch.setattr(channel, "SEGMENT", 32)
    for size in (2, 3, 5, 8):
        for length in (7, 8, 9, 100, 129):
            check(name, [rank // 2 for rank in range(size)], length, np.add, "float32")


def test_bytes_of_a_ring_are_the_fewest_there_can_be() -> None:
    """2 (N-1)/N of the buffer a rank: exactly where parts are even; over all ranks always 2 (N-1) buffers."""
    for size in range(2, 10):
        even = check("ring", [0] * size, 30 * size, np.add, "float32")
        assert even == [2 * (size - 1) * 30 * 4] * size
        for length in LENGTHS:
            uneven = check("ring", [0] * size, length, np.add, "float32")
            assert sum(uneven) == 2 * (size - 1) * length * 4
            part = length // size
            assert all(2 * (size - 1) * part * 4 <= sent <= 2 * (size - 1) * (part + 1) * 4 for sent in uneven)


def test_bytes_of_the_others() -> None:
    for steps in (1, 2, 3):
        size = 2**steps
        assert check("recursive_doubling", [0] * size, 40, np.add, "float32") == [steps * 160] * size
        assert check("halving_doubling", [0] * size, 40, np.add, "float32") == [2 * (size - 1) * 160 // size] * size
    assert check("recursive_doubling", [0] * 3, 40, np.add, "float32") == [160, 2 * 160, 160]
    # In the pair (0, 1) rank 0 sits out: half each way and its half of the sum; then 1 and 2 halve and double.
    assert check("halving_doubling", [0] * 3, 40, np.add, "float32") == [160, 80 + 160 + 160, 160]
    for size in range(1, 10):
        sent = check("tree", [0] * size, 40, np.add, "float32")
        assert sum(sent) == 2 * (size - 1) * 160
    assert check("tree", [0] * 4, 40, np.add, "float32") == [2 * 160, 160, 2 * 160, 160]


def test_between_hosts_a_hierarchy_sends_what_one_rank_a_host_would() -> None:
    """2 (H-1)/H of one buffer leaves each host, however many ranks it has."""
    length, item = 144, 4
    for hosts in ([0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 0, 1]):
        count, local = max(hosts) + 1, hosts.count(0)
        sent = check("hierarchical", hosts, length, np.add, "float32")
        within = 2 * (local - 1) * length * item // local
        between = 2 * (count - 1) * length * item // count
        assert sent == [within + between // local] * len(hosts)


def test_the_option_lists_the_algorithms() -> None:
    for name in (*ALGORITHMS, "mpi", "auto"):
        assert environment.ALLREDUCE.read({"HVDX_ALLREDUCE": name.upper()}) == name
    with pytest.raises(environment.ConfigurationError, match=r"HVDX_ALLREDUCE='butterfly'.*recursive_doubling"):
        environment.ALLREDUCE.read({"HVDX_ALLREDUCE": "butterfly"})
    assert environment.ALLREDUCE.read({}) == "auto"
