"""No copy of the gradients beyond the fusion buffers: what TensorFlow gets back lies in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdx.comm.communicator import Label
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
