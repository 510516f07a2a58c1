"""What ranks of one host share: results that nobody can disturb, one set of buffers, every dtype and operation."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.comm.communicator import Label
from hvdx.comm.reduce_op import ReduceOp
from hvdx.comm.shared.memory import RESULTS, SMALL

pytestmark = pytest.mark.np(2, 3, 4, plain=False, comm=["shared_memory"])
COUNT = SMALL // 4 + 1001  # float32 numbers that do not fit the half that needs no reservation; not divisible by much
DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "int32", "uint64", "complex64", "bool"]


def values(rank: int, count: int, dtype: str) -> np.ndarray:
    random = np.random.default_rng(100 + rank)
    numbers = random.integers(0, 7, count) if dtype != "float32" else random.standard_normal(count)
    return numbers.astype(tf.as_dtype(dtype).as_numpy_dtype)


def expected(count: int, dtype: str, op: ReduceOp) -> np.ndarray:
    wide = np.complex128 if dtype.startswith("complex") else np.float64
    stack = np.stack([values(rank, count, dtype).astype(wide) for rank in range(hvd.size())])
    if op is hvd.Min:
        return stack.min(0)
    if op is hvd.Max:
        return stack.max(0)
    total = stack.prod(0) if op is hvd.Product else stack.sum(0)
    if op is hvd.Average:
        total = total / hvd.size()
        total = np.trunc(total) if "int" in dtype else total
    return total


def reduce(tensors: list[tf.Tensor], op: ReduceOp, threshold: int = 1 << 27) -> list[tf.Tensor]:
    """Reduce in a graph, where results are lent and not copied."""
    communicator = hvd.world.communicator()
    return tf.function(lambda: communicator.grouped_allreduce(tensors, op, Label("tensors"), threshold))()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_small_equal_numpy(world: Any, dtype: str) -> None:
    """Tensors of both ways and a few buckets in one call, with an empty one and a scalar."""
    if dtype == "bool":
        ops = [hvd.Min, hvd.Max]
    elif dtype.startswith("complex"):
        ops = [hvd.Sum, hvd.Average]
    else:
        ops = [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product]
    counts = [COUNT * (8 // tf.as_dtype(dtype).size + 1), 0, 5, COUNT, 1]
    for op in ops:
        for sizes in (counts, counts[1:3] + counts[4:]):
            got = reduce([tf.constant(values(world.rank(), n, dtype)) for n in sizes], op, threshold=1 << 18)
            for tensor, count in zip(got, sizes, strict=True):
                wanted = expected(count, dtype, op)
                if dtype in {"int8", "uint64", "int32"}:
                    wanted = wanted.astype(np.int64).astype(tf.as_dtype(dtype).as_numpy_dtype)
                tolerance = 2e-2 if tf.as_dtype(dtype).size == 2 else 1e-6
                result = tf.cast(tensor, wanted.dtype).numpy() if dtype != "bool" else tensor.numpy()
                np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)
                everywhere = world.allgather_object(tensor.numpy().tobytes())
                assert all(bits == everywhere[0] for bits in everywhere)


def test_results_that_are_kept_stay_as_they_are(world: Any) -> None:
    """More results than there are places for: the last ones are copied out, and none is written again."""
    mine = tf.constant(values(world.rank(), COUNT, "float32"))
    kept = [reduce([mine * float(step)], hvd.Sum)[0] for step in range(2 * RESULTS)]
    total = expected(COUNT, "float32", hvd.Sum)
    for step, result in enumerate(kept):
        np.testing.assert_allclose(result, total * step, rtol=1e-5, atol=1e-5)


def test_steps_use_one_buffer_and_one_result_of_the_host(world: Any) -> None:
    memory = world.world.communicator()._memory
    world.barrier()
    tensors = [tf.constant(values(world.rank(), n, "float32")) for n in (40 * COUNT, 7, 3 * COUNT)]
    nbytes = sum(4 * int(tensor.shape[0]) for tensor in tensors)
    before = [result.held for result in memory.results]

    @tf.function
    def step() -> tf.Tensor:
        reduced = world.world.communicator().grouped_allreduce(tensors, hvd.Average, Label("gradients"), 1 << 27)
        return tf.add_n([tf.reduce_sum(value) for value in reduced])

    for _ in range(10):
        step()
    grown = [now.held - was for now, was in zip(memory.results, before, strict=True)]
    assert sum(size > 0 for size in grown) == 1
    assert memory.own.held <= 1.01 * nbytes + 2 * SMALL
    assert max(result.held for result in memory.results) <= 1.01 * nbytes
    # What is really there, each page counted once on the host; small differences come from tests before this one.
    world.barrier()
    resident = sum(world.allgather_object(resident_shared_bytes()))
    world.barrier()
    # Of each buffer the part that its rank adds is never written; together with the result that is a buffer a rank.
    assert 0.9 * nbytes < resident <= world.size() * (1.01 * nbytes + 2 * SMALL) + sum(before)


def resident_shared_bytes() -> int:
    """Return this process's share of the memory files it has mapped: a page that n processes map counts 1/n."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = "memfd:" in line
        elif counts and line.startswith("Pss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.parametrize(("count", "meetings"), [(1000, 1), (COUNT, 2)], ids=["small", "large"])
def test_agreeing_takes_no_round_trip_of_its_own(
    world: Any, monkeypatch: pytest.MonkeyPatch, count: int, meetings: int
) -> None:
    """Ranks meet when all have packed, with their signatures, and where each adds a slice, when all have added."""
    communicator: Any = hvd.world.communicator()
    tensors = [tf.constant(values(hvd.rank(), count, "float32")), tf.constant([1.0, 2.0])]
    step = tf.function(lambda: communicator.grouped_allreduce(tensors, hvd.Sum, Label("tensors"), 1 << 27))
    for _ in range(3):
        result = step()  # memory is reserved, also for a result beside the one that is still held
    board, posted = communicator._memory.board, []
    post = board.post
    monkeypatch.setattr(board, "post", lambda *row: (posted.append(len(row)), post(*row))[1])
    for _ in range(3):
        result = step()
    assert len(posted) == 3 * meetings
    assert posted[::meetings] == [1] * 3  # the signature, with which the first meeting begins
    np.testing.assert_allclose(result[0], expected(count, "float32", hvd.Sum), rtol=1e-5, atol=1e-6)


def test_a_rank_that_computes_uses_no_second_core(world: Any) -> None:
    """What computes is one thread here: all CPU time beyond its own would be hvdx's or MPI's."""
    world.allreduce(tf.constant(values(world.rank(), COUNT, "float32")))
    end = time.monotonic() + 0.5
    everything, own = time.process_time(), time.thread_time()
    while time.monotonic() < end:
        pass
    everything, own = time.process_time() - everything, time.thread_time() - own
    assert everything <= own + 0.05
    world.barrier()


def test_nobody_can_write_to_a_lent_result(world: Any) -> None:
    [result] = reduce([tf.constant(values(world.rank(), COUNT, "float32"))], hvd.Sum)
    address = result._numpy().__array_interface__["data"][0]
    lent = [place.readable(0) for place in world.world.communicator()._memory.results]
    assert any(place.nbytes and place.ctypes.data <= address < place.ctypes.data + place.nbytes for place in lent)
    assert all(not place.flags.writeable for place in lent if place.nbytes)


def test_long_gathers_and_broadcasts_go_in_pieces(world: Any) -> None:
    count = 3 * SMALL + 17
    rows = tf.fill([count * (world.rank() + 1), 1], np.int8(world.rank() + 1))
    gathered = world.allgather(rows).numpy().reshape(-1)
    counts = [count * (rank + 1) for rank in range(world.size())]
    wanted = np.concatenate([np.full(n, rank + 1, np.int8) for rank, n in enumerate(counts)])
    np.testing.assert_array_equal(gathered, wanted)
    sent = world.broadcast(tf.range(count) * (world.rank() + 1), root_rank=world.size() - 1)
    np.testing.assert_array_equal(sent, np.arange(count) * world.size())


def test_after_a_mismatch_of_large_tensors_the_next_sum_is_right(world: Any) -> None:
    with pytest.raises(hvd.MismatchError, match="rank 0: allreduce"):
        world.allreduce(tf.ones([COUNT + world.rank()]))
    np.testing.assert_allclose(world.allreduce(tf.ones([COUNT]), hvd.Sum), np.full(COUNT, float(world.size())))


def test_autograph_leaves_what_runs_in_each_step_alone(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = world.world.communicator()
    files: list[str] = []
    original = communicator._allreduce_arrays

    def spy(*arguments: Any) -> Any:
        files.append(sys._getframe(1).f_code.co_filename)
        return original(*arguments)

    monkeypatch.setattr(communicator, "_allreduce_arrays", spy)
    tf.function(lambda x: world.allreduce(x, name="weights"), autograph=True)(tf.ones([3]))

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return world.allreduce(x, name="weights")

    step(tf.ones([3]))
    assert [Path(file).name for file in files] == ["host.py"] * 2
