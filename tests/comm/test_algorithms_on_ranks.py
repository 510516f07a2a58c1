"""Every choice of HVDX_ALLREDUCE over MPI: through hvd.allreduce against numpy, and the bytes that really travelled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

if os.environ.get("HVDX_COMM") not in {"mpi", "shared_memory"}:
    # The imports below load MPI, which would then be ended while Horovod's thread still uses it.
    pytest.skip("only on ranks that use MPI", allow_module_level=True)

import hvdx.world
from hvdx.comm.algorithms import ALGORITHMS, measured, over_mpi, pieces
from hvdx.comm.mpi import MpiCommunicator
from hvdx.comm.mpi_buffers import MpiBuffers
from hvdx.comm.reduce_op import ReduceOp
from hvdx.fusion import aligned
from tests.ops.test_allreduce import NUMPY, OPS, expected, numbers, same

pytestmark = pytest.mark.np(2, 3, 4, plain=False, comm=["mpi", "shared_memory"])

CHOICES = ["auto", "mpi", *ALGORITHMS]


@pytest.fixture(scope="module", autouse=True)
def mpi() -> Iterator[MpiCommunicator]:
    """The world on MPI; where ranks share memory, a communicator of its own stands in for theirs for this file."""
    world_module: Any = hvdx.world
    was = world_module._communicator
    if type(was) is MpiCommunicator:
        yield was
        return
    made = world_module._communicator = MpiCommunicator()
    yield made
    world_module._communicator = was
    assert made.close(clean=True)


@pytest.fixture
def buffers(mpi: MpiCommunicator) -> Iterator[MpiBuffers]:
    """What moves the bytes of this world; its algorithm is what it was, afterwards."""
    was = mpi._buffers.algorithm
    yield mpi._buffers
    mpi._buffers.algorithm = was


def random(rank: int, length: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=length).astype(np.float32)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_through_allreduce(world: Any, buffers: MpiBuffers, choice: str) -> None:
    buffers.algorithm = choice
    rank, size = world.rank(), world.size()
    for op in OPS:
        for dtype in ("float32", "float64", "int8", "uint64", "float16", "bfloat16"):
            same(world.allreduce(tf.constant(numbers(dtype, rank)), op), expected(op, dtype, size))
    flags = tf.constant([rank == 0, True, False])
    assert world.allreduce(flags, "Max").numpy().tolist() == [True, True, False]
    assert world.allreduce(tf.zeros([0])).shape == (0,)
    same(world.allreduce(tf.constant(rank + 1.0), "Sum"), np.float32(size * (size + 1) / 2))
    same(world.allreduce(tf.constant(numbers("complex64", rank)), "Sum"), expected("Sum", "complex64", size))
    # longer than a segment, and not divisible by anything
    length = 700_001
    result = world.allreduce(tf.constant(random(rank, length)), "Sum").numpy()
    reference = np.sum([random(r, length) for r in range(size)], axis=0)
    np.testing.assert_allclose(result, reference, rtol=1e-4, atol=1e-5)
    assert len({one.tobytes() for one in world.allgather_object(result)}) == 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_exactly_the_bytes_of_the_formula_travel(world: Any, buffers: MpiBuffers, name: str) -> None:
    channel = buffers._channel
    for length in (1, 1000, 700_001):
        before = channel.bytes_sent
        buffers.algorithm = name
        world.allreduce(tf.constant(random(world.rank(), length)), "Sum")
        sent = channel.bytes_sent - before
        padded = aligned(4 * length)  # in a fusion buffer
        assert sent == ALGORITHMS[name].bytes_sent(channel.rank, channel.hosts, padded // 4, 4)
        assert sum(world.allgather_object(sent)) >= 2 * (world.size() - 1) * padded


def test_hosts_that_one_machine_pretends_to_be(world: Any, buffers: MpiBuffers) -> None:
    """The last rank alone on its host: the hierarchy has uneven hosts where there are three ranks or more."""
    size, rank, length = world.size(), world.rank(), 1001
    channel = over_mpi.MpiChannel(buffers.comm, ["a"] * (size - 1) + ["b"])
    assert channel.hosts == (*[0] * (size - 1), 1)
    for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        buffer = random(rank, length)
        over_mpi.reduce(channel, buffer, op, "hierarchical")
        reference = NUMPY[op.value]([random(r, length) for r in range(size)], axis=0)
        np.testing.assert_allclose(buffer, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("alone", [True, False], ids=["a host each", "the last on its own"])
def test_pieces_of_two_sizes_are_on_their_way(
    world: Any, buffers: MpiBuffers, monkeypatch: pytest.MonkeyPatch, name: str, alone: bool
) -> None:
    for constant, value in (("WITHIN", 1 << 18), ("BETWEEN", 1 << 16), ("WINDOW", 1 << 19)):
        monkeypatch.setattr(pieces, constant, value)
    size, rank = world.size(), world.rank()
    channel = over_mpi.MpiChannel(buffers.comm, None if alone else ["a"] * (size - 1) + ["b"])
    for length in (1, 255, 900_001):
        buffer = random(rank, length)
        over_mpi.reduce(channel, buffer, ReduceOp.SUM, name)
        reference = np.sum([random(r, length) for r in range(size)], axis=0)
        np.testing.assert_allclose(buffer, reference, rtol=1e-4, atol=1e-5)
        assert len({one.tobytes() for one in world.allgather_object(buffer)}) == 1


def test_messages_larger_than_mpi_can_count(world: Any, buffers: MpiBuffers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_mpi, "PIECE", 1000)
    buffer = random(world.rank(), 5003)
    over_mpi.reduce(buffers._channel, buffer, ReduceOp.SUM, "mpi")
    reference = np.sum([random(r, 5003) for r in range(world.size())], axis=0)
    np.testing.assert_allclose(buffer, reference, rtol=1e-4, atol=1e-5)


def test_what_is_broken_off_stays_in_memory_while_mpi_may_write_to_it(
    world: Any, buffers: MpiBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception between two pieces, as by Ctrl-C: what is still under way arrives in memory that nobody else has."""
    comm = buffers.comm.Dup()
    monkeypatch.setattr(pieces, "_abandoned", [])
    others = [pieces.Peer((world.rank() + step) % world.size(), near=False) for step in (1, -1)]
    send, mine = random(world.rank(), 300_000), np.zeros(300_000, np.float32)

    def take(start: int, part: np.ndarray) -> None:
        if start:
            raise KeyboardInterrupt
        mine[start : start + part.size] = part

    into = pieces.slots(mine.size, mine.dtype, others[1])
    with pytest.raises(KeyboardInterrupt):
        pieces.exchange(comm, send, others[0], into, mine.size, others[1], take)
    [(outgoing, incoming, kept)] = pieces._abandoned
    assert incoming
    assert kept is into
    for request, _ in incoming:
        request.Wait()
    outgoing.wait_until(send.size)
    left = (world.rank() - 1) % world.size()
    received = np.concatenate([mine[: into[0].size], into[1]])
    np.testing.assert_array_equal(received, random(left, 300_000)[: received.size])
    comm.Free()


def test_auto_takes_what_was_measured(world: Any, buffers: MpiBuffers, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = buffers._channel
    monkeypatch.setattr(channel, "_thresholds", measured.to_thresholds({"0": "mpi", "400": "tree"}))
    for length, sent in ((99, 0), (100, ALGORITHMS["tree"].bytes_sent(channel.rank, channel.hosts, 100, 4))):
        before = channel.bytes_sent
        over_mpi.reduce(channel, random(world.rank(), length), ReduceOp.SUM, "auto")
        assert channel.bytes_sent - before == sent
