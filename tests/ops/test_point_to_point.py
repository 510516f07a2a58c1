"""send and recv between two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.np(2, 3, plain=False, comm=["mpi", "shared_memory"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "int8"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_a_tensor_goes_round_the_ring(world: Any, dtype: str, shape: tuple[int, ...]) -> None:
    rank, n = world.rank(), world.size()
    world.send(tf.cast(tf.fill(shape, rank), dtype), (rank + 1) % n, tag=5)
    result = world.recv(tf.TensorSpec(shape, dtype), (rank - 1) % n, tag=5)
    assert tf.reduce_all(result == tf.cast((rank - 1) % n, dtype))


def test_inside_a_graph_with_an_open_shape(world: Any) -> None:
    rank, n = world.rank(), world.size()

    @tf.function
    def exchange(x: tf.Tensor) -> tf.Tensor:
        world.send(x, (rank + 1) % n)
        return world.recv(tf.TensorSpec([None, 2], tf.float32), (rank - 1) % n) + 0.0

    result = exchange(tf.fill([rank + 1, 2], float(rank)))
    assert result.shape == ((rank - 1) % n + 1, 2)


def test_tags_keep_messages_apart_and_order_holds_within_one(world: Any) -> None:
    rank, n = world.rank(), world.size()
    for tag, value in ((1, 10), (2, 20), (1, 11)):
        world.send(value, (rank + 1) % n, tag)
    source = (rank - 1) % n
    got = [int(world.recv(tf.TensorSpec([], tf.int32), source, tag)) for tag in (2, 1, 1)]
    assert got == [20, 10, 11]


def test_dimensions(world: Any) -> None:
    rank, n = world.rank(), world.size()
    world.send(tf.fill([1] * 14, rank), (rank + 1) % n)
    assert world.recv(tf.TensorSpec([1] * 14, tf.int32), (rank - 1) % n).shape == [1] * 14
    with pytest.raises(world.UnsupportedError, match="at most 14 dimensions"):
        world.send(tf.fill([1] * 15, rank), (rank + 1) % n)


def test_large_tensors(world: Any) -> None:
    rank, n = world.rank(), world.size()
    data = np.arange(1 << 20, dtype=np.float64) + rank
    if rank == 0:
        world.send(data, n - 1)
    elif rank == n - 1:
        np.testing.assert_array_equal(world.recv(data, 0).numpy(), data - rank)
    world.barrier()


def test_another_shape_than_expected_is_named(world: Any) -> None:
    if world.rank() == 0:
        world.send(tf.ones([3]), 1)
    elif world.rank() == 1:
        with pytest.raises(world.MismatchError, match="rank 0 sent float32 3"):
            world.recv(tf.TensorSpec([4], tf.float32), 0)
    world.barrier()


@pytest.mark.parametrize(("rank", "tag"), [(99, 0), (-1, 0), (0, -1), (0, 1 << 20)])
def test_ranks_and_tags_out_of_range(world: Any, rank: int, tag: int) -> None:
    with pytest.raises(world.ConfigurationError):
        world.send(tf.ones(1), rank, tag)
    with pytest.raises(world.ConfigurationError):
        world.recv(tf.ones(1), rank, tag)
