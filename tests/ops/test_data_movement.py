"""All-gather, broadcast, barrier, objects and variables, on every communicator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.np(2, 3, 4)

DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16"]
DTYPES += ["float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_allgather_with_unequal_first_dimensions(world: Any, dtype: str) -> None:
    rank, n = world.rank(), world.size()
    result = world.allgather(tf.cast(tf.fill([rank, 2], rank + 1), dtype))  # rank 0 brings nothing
    reference = np.concatenate([np.full((r, 2), r + 1) for r in range(n)])
    assert result.dtype == tf.as_dtype(dtype)
    assert result.shape == reference.shape
    assert tf.reduce_all(result == tf.cast(reference, dtype))


def test_allgather_of_scalars(world: Any) -> None:
    assert world.allgather(world.rank()).numpy().tolist() == list(range(world.size()))


def test_allgather_in_a_graph_has_an_open_first_dimension(world: Any) -> None:
    @tf.function
    def gather(x: tf.Tensor) -> tf.Tensor:
        result = world.allgather(x)
        assert result.shape.as_list() == ([None, 3] if world.size() > 1 else [2, 3])
        return result

    assert gather(tf.ones([2, 3])).shape == (2 * world.size(), 3)


def test_allgather_gradient_is_the_sum_of_all_ranks(world: Any) -> None:
    rank, n = world.rank(), world.size()
    x = tf.ones([rank + 1, 2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = (rank + 1.0) * tf.reduce_sum(world.allgather(x) ** 2)
    np.testing.assert_allclose(tape.gradient(loss, x).numpy(), 2.0 * n * (n + 1) / 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(world: Any, dtype: str) -> None:
    root = world.size() - 1
    result = world.broadcast(tf.cast(tf.fill([2, 3], world.rank()), dtype), root)
    assert tf.reduce_all(result == tf.cast(root, dtype))


@pytest.mark.parametrize("shape", [[], [0], [3, 0]])
def test_broadcast_of_scalars_and_empty_tensors(world: Any, shape: list[int]) -> None:
    assert world.broadcast(tf.ones(shape), 0).shape == shape


def test_broadcast_gradient_goes_to_the_root(world: Any) -> None:
    x = tf.constant([2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(world.broadcast(x, 0)) * (world.rank() + 1)
    n = world.size()
    assert tape.gradient(loss, x).numpy().tolist() == [n * (n + 1) / 2 if world.rank() == 0 else 0.0]


@pytest.mark.parametrize("root", [-1, 99, 1.5, True])
def test_a_root_out_of_range_is_refused_on_every_rank(world: Any, root: Any) -> None:
    for call in (lambda: world.broadcast(tf.ones(1), root), lambda: world.broadcast_object(1, root)):
        with pytest.raises(world.ConfigurationError, match=r"root rank must be an integer from 0"):
            call()


def test_broadcast_variables_of_every_kind(world: Any, keras: Any) -> None:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    optimizer = keras.optimizers.Adam(0.1 * (world.rank() + 1))
    optimizer.build(model.trainable_variables)
    plain = [
        tf.Variable(world.rank()),
        tf.Variable([True, world.rank() == 0]),
        tf.Variable(0.5 * world.rank(), dtype=tf.float64),
    ]
    variables = optimizer.variables
    variables = [*model.weights, *(variables() if callable(variables) else variables), *plain]
    for variable in model.weights:
        variable.assign(tf.fill(variable.shape, float(world.rank())))
    world.broadcast_variables(variables, root_rank=0)
    assert all(tf.reduce_all(tf.convert_to_tensor(weight) == 0.0) for weight in model.weights)
    assert [v.numpy().tolist() for v in plain] == [0, [True, True], 0.0]
    states = world.allgather_object([tf.convert_to_tensor(variable).numpy().tolist() for variable in variables])
    assert all(state == states[0] for state in states)


def test_variables_without_numbers_are_left_alone(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    text = tf.Variable(f"rank {world.rank()}", name="vocabulary")
    number = tf.Variable(world.rank())
    world.broadcast_variables([text, number])
    assert text.numpy().decode() == f"rank {world.rank()}"
    assert number.numpy() == 0


def test_objects(world: Any) -> None:
    rank, n = world.rank(), world.size()
    value = {"rank": rank, "list": [1] * rank}
    assert world.allgather_object(value) == [{"rank": r, "list": [1] * r} for r in range(n)]
    assert world.broadcast_object(value if rank == n - 1 else None, n - 1)["rank"] == n - 1


def test_barrier_eager_and_in_a_graph(world: Any) -> None:
    world.barrier()

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([world.barrier()]):
            return x + 1

    assert step(tf.constant(1)).numpy() == 2


def test_many_calls_in_a_row_stay_paired(world: Any) -> None:
    @tf.function
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return world.allreduce(x, world.Sum), world.allgather(x[:1]), world.broadcast(x * 2, 0)

    for number in range(30):
        total, gathered, root = step(tf.fill([4], float(number + world.rank())))
        ranks = np.arange(world.size())
        np.testing.assert_allclose(total.numpy(), (number + ranks).sum())
        np.testing.assert_allclose(gathered.numpy(), number + ranks)
        np.testing.assert_allclose(root.numpy(), 2.0 * number)
