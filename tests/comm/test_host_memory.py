"""No copy of the gradients beyond the fusion buffers: what TensorFlow gets back lies in them."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdx.comm.communicator import Label
from hvdx.comm.halves import PIECE
from hvdx.comm.reduce_op import ReduceOp

pytestmark = pytest.mark.np(2, plain=False, comm=["mpi"])
SHAPES = [(300, 400), (1000,), (7, 7, 64, 64), (3,)]


def lies_in(tensor: Any, owners: list[np.ndarray]) -> bool:
    address = tensor._numpy().__array_interface__["data"][0]
    return any(owner.ctypes.data <= address < owner.ctypes.data + owner.nbytes for owner in owners)


def test_results_are_views_into_the_fusion_buffer(world: Any) -> None:
    communicator = world.world.communicator()

    @tf.function
    def reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return communicator.grouped_allreduce(tensors, ReduceOp.AVERAGE, Label("gradients"), 1 << 27)

    results = reduce([tf.random.normal(shape) for shape in SHAPES])
    for result in results:
        assert lies_in(result, communicator._pool._owners)


def test_steps_that_consume_the_result_use_one_set_of_buffers(world: Any) -> None:
    communicator = world.world.communicator()
    communicator._pool._owners.clear()
    tensors = [tf.random.normal(shape) for shape in SHAPES]
    nbytes = sum(4 * int(np.prod(shape)) for shape in SHAPES)

    @tf.function
    def step() -> tf.Tensor:
        reduced = communicator.grouped_allreduce(tensors, ReduceOp.AVERAGE, Label("gradients"), 1 << 27)
        return tf.add_n([tf.reduce_sum(value) for value in reduced])

    for _ in range(10):
        step()
    assert communicator._pool.nbytes < 1.1 * nbytes + (1 << 14)


def test_inputs_reach_the_exchange_without_a_copy(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = world.world.communicator()
    seen = []
    original = communicator._allreduce_arrays

    def spy(arrays: list[np.ndarray], *rest: Any) -> Any:
        seen.extend(array.flags.owndata for array in arrays)
        return original(arrays, *rest)

    monkeypatch.setattr(communicator, "_allreduce_arrays", spy)
    tensors = [tf.random.normal(shape) for shape in SHAPES]
    tf.function(lambda: communicator.grouped_allreduce(tensors, ReduceOp.SUM, Label(), 1 << 27))()
    communicator.grouped_allreduce(tensors, ReduceOp.SUM, Label(), 1 << 27)
    assert seen == [False] * (2 * len(SHAPES))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_exchanged_in_pieces(world: Any, dtype: str) -> None:
    """A buffer of eight pieces and a short one: beside the buffer itself there is less than another."""
    size = 8 * PIECE + 5
    mine = tf.cast(tf.range(size) % 7 + world.rank(), dtype)
    communicator = world.world.communicator()
    communicator.grouped_allreduce([mine], ReduceOp.SUM, Label("halves"), 1 << 27)
    tracemalloc.start()
    try:
        [result] = communicator.grouped_allreduce([mine], ReduceOp.SUM, Label("halves"), 1 << 27)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    expected = (np.arange(size) % 7) * world.size() + sum(range(world.size()))
    np.testing.assert_array_equal(result.numpy().astype(np.int64), expected)
    assert peak < 1.7 * 2 * size


def test_other_operations_on_halves_in_pieces(world: Any) -> None:
    size = PIECE + 3
    mine = tf.cast(tf.range(size) % 5 - world.rank(), tf.float16)
    assert (world.allreduce(mine, world.Max).numpy() == (np.arange(size) % 5)).all()
