"""All-reduce against numpy: every operation and dtype, eager and in graphs, on every communicator."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.np(2, 3, 4)

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
OPS = ["Sum", "Average", "Min", "Max", "Product"]
NUMPY = {"Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}


def numbers(dtype: str, rank: int, shape: tuple[int, ...] = (3, 5)) -> np.ndarray:
    """Return small numbers that differ between ranks; all exact in every dtype, so sums have no rounding."""
    values = np.random.default_rng(rank).integers(1, 5, shape)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def expected(op: str, dtype: str, size: int, shape: tuple[int, ...] = (3, 5)) -> np.ndarray:
    stack = np.stack([numbers(dtype, rank, shape) for rank in range(size)])
    wide = stack.astype("complex128" if stack.dtype.kind == "c" else "float64")
    if op == "Average":
        result = wide.mean(0)
        return np.trunc(result).astype(stack.dtype) if stack.dtype.kind in "iu" else result.astype(stack.dtype)
    return NUMPY[op](wide, axis=0).astype(stack.dtype)


def same(result: Any, reference: np.ndarray) -> None:
    result = np.asarray(result.numpy() if hasattr(result, "numpy") else result)
    assert result.dtype == reference.dtype
    assert result.shape == reference.shape
    kind = "complex128" if reference.dtype.kind == "c" else "float64"
    tolerance = 1e-2 if reference.dtype.itemsize == 2 and reference.dtype.kind not in "iu" else 1e-6
    np.testing.assert_allclose(result.astype(kind), reference.astype(kind), rtol=tolerance)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_operations_and_dtypes(world: Any, op: str, dtype: str) -> None:
    tensor = tf.constant(numbers(dtype, world.rank()))
    same(world.allreduce(tensor, getattr(world, op)), expected(op, dtype, world.size()))


@pytest.mark.parametrize("op", ["Sum", "Average"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex(world: Any, op: str, dtype: str) -> None:
    tensor = tf.constant(numbers(dtype, world.rank()))
    same(world.allreduce(tensor, op), expected(op, dtype, world.size()))


@pytest.mark.parametrize(
    ("dtype", "op"), [("complex64", "Max"), ("bool", "Sum"), ("bool", "Average"), ("bool", "Product")]
)
def test_what_has_no_meaning_is_refused_by_name(world: Any, dtype: str, op: str) -> None:
    with pytest.raises(world.UnsupportedError, match=f"hvd.{op}.*{dtype}"):
        world.allreduce(tf.zeros([2], dtype), op)


def test_strings_are_refused(world: Any) -> None:
    with pytest.raises(world.UnsupportedError, match="string"):
        world.allreduce(tf.constant(["a"]))


def test_bool_and_or(world: Any) -> None:
    flags = tf.constant([world.rank() == 0, True, False])
    assert world.allreduce(flags, world.Max).numpy().tolist() == [True, True, False]
    assert world.allreduce(flags, world.Min).numpy().tolist() == [world.size() == 1, True, False]


@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 2), (1,), (7, 1, 3)])
def test_scalars_and_empty_tensors(world: Any, shape: tuple[int, ...]) -> None:
    same(
        world.allreduce(tf.constant(numbers("float32", world.rank(), shape))),
        expected("Average", "float32", world.size(), shape),
    )


def test_numbers_lists_and_arrays(world: Any) -> None:
    n = world.size()
    assert world.allreduce(world.rank(), world.Sum).numpy() == n * (n - 1) // 2
    assert world.allreduce([1.0, 2.0], world.Sum).numpy().tolist() == [n, 2 * n]
    assert world.allreduce(np.ones(2), world.Sum).numpy().tolist() == [n, n]


def test_inside_tf_function_with_control_flow(world: Any) -> None:
    @tf.function
    def loop(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = tf.cond(tf.reduce_sum(x) > -1e30, lambda x=x: world.allreduce(x, world.Sum), lambda x=x: x * 0.0)
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, world.allreduce(y)), (0, x))[1]

    result = loop(tf.ones([2]))
    np.testing.assert_allclose(result.numpy(), float(world.size()) ** 3)


def test_grouped_equals_one_by_one_equals_numpy(world: Any) -> None:
    """Sizes 0, T-1, T, T+1 and above the threshold, dtypes mixed, twice: the same bits."""
    threshold = 256
    shapes = [(0,), (63,), (64,), (65,), (1000,), (), (3, 3)]
    rng = np.random.default_rng(world.rank())
    tensors = [tf.constant(rng.normal(size=shape), dtype) for shape in shapes for dtype in ("float32", "float64")]
    stacks = [np.stack(world.allgather_object(tensor.numpy())) for tensor in tensors]
    grouped = [world.grouped_allreduce(tensors, fusion_threshold=threshold) for _ in range(2)]
    single = [world.allreduce(tensor) for tensor in tensors]
    for first, second, alone, stack in zip(*grouped, single, stacks, strict=True):
        assert first.numpy().tobytes() == second.numpy().tobytes() == alone.numpy().tobytes()
        np.testing.assert_allclose(first.numpy(), stack.mean(0), rtol=1e-5, atol=1e-6)


def test_all_ranks_hold_the_same_bits(world: Any) -> None:
    tensor = tf.constant(np.random.default_rng(world.rank()).normal(size=10_001), tf.float32)
    results = world.allgather_object(world.allreduce(tensor).numpy().tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_averages_of_16_bits_do_not_overflow(world: Any, dtype: str) -> None:
    largest = float(ml_dtypes.finfo(tf.as_dtype(dtype).as_numpy_dtype).max)
    result = world.allreduce(tf.constant([largest, -largest], dtype), world.Average)
    np.testing.assert_allclose(result.numpy().astype("float64"), [largest, -largest], rtol=1e-2)


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16"])
def test_compression(world: Any, codec: str) -> None:
    rng = np.random.default_rng(world.rank())
    tensor = tf.constant(rng.normal(size=257), tf.float32)
    reference = np.mean(world.allgather_object(tensor.numpy()), axis=0)
    result = world.allreduce(tensor, compression=getattr(world.Compression, codec))
    assert result.dtype == tf.float32
    np.testing.assert_allclose(result.numpy(), reference, atol={"none": 1e-6, "fp16": 2e-3, "bf16": 2e-2}[codec])


def test_scale_factors(world: Any) -> None:
    result = world.allreduce(tf.ones([2]), world.Sum, prescale_factor=0.5, postscale_factor=3.0)
    np.testing.assert_allclose(result.numpy(), 1.5 * world.size())
    with pytest.raises(world.ConfigurationError, match="floating-point"):
        world.allreduce(tf.ones([2], tf.int32), world.Sum, prescale_factor=0.5)


def test_an_unknown_operation_is_refused(world: Any) -> None:
    with pytest.raises(world.ConfigurationError, match="'Median'"):
        world.allreduce(tf.ones([2]), "Median")


def test_indexed_slices(world: Any) -> None:
    """Repeated and overlapping rows: equal to the dense average, every index once."""
    rank, n = world.rank(), world.size()
    slices = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([1, 1, 2 + rank], tf.int64), tf.constant([8, 2], tf.int64))
    result = world.allreduce(slices)
    dense = np.zeros((8, 2))
    dense[1] = 2
    for r in range(n):
        dense[2 + r] += 1 / n
    indices = result.indices.numpy().tolist()
    assert len(indices) == len(set(indices))
    np.testing.assert_allclose(tf.convert_to_tensor(result).numpy(), dense, rtol=1e-6)


def test_integer_slices_keep_their_dtype(world: Any) -> None:
    """Their average is rounded towards zero, as that of dense integers is."""
    slices = tf.IndexedSlices(tf.constant([[-7], [5]]), tf.constant([0, 1]), tf.constant([2, 1]))
    scaled = tf.IndexedSlices(slices.values * (world.rank() + 1), slices.indices, slices.dense_shape)
    result = tf.convert_to_tensor(world.allreduce(scaled))
    total = sum(range(1, world.size() + 1))
    assert result.dtype == tf.int32
    assert result.numpy().tolist() == [[int(-7 * total / world.size())], [int(5 * total / world.size())]]


def test_slices_are_compressed(world: Any) -> None:
    value = 1.0 + 2.0**-13  # more digits than float16 has
    slices = tf.IndexedSlices(tf.fill([2, 3], value), tf.constant([0, 4]), tf.constant([6, 3]))
    rounded = world.allreduce(slices, compression=world.Compression.fp16).values.numpy()
    np.testing.assert_allclose(rounded, value, rtol=1e-3)
    if world.size() > 1:
        assert (rounded != np.float32(value)).all()
    with pytest.raises(world.ConfigurationError, match="nonsense"):
        world.allreduce(slices, compression="nonsense")


@pytest.mark.parametrize("op", OPS)
def test_gradients(world: Any, op: str) -> None:
    """The gradient of the sum of all ranks' losses, against the formula of each operation."""
    rank, n = world.rank(), world.size()
    values = np.array([[1.0 + r, 2.0, 3.0 - r, 0.0 if r == 0 else 2.0] for r in range(n)])
    weights = np.array([[1.0 + r, 2.0, 0.5, 1.0] for r in range(n)])
    x = tf.constant(values[rank])
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(world.allreduce(x, op) * weights[rank])
    gradient = tape.gradient(loss, x).numpy()
    total = weights.sum(0)
    if op == "Sum":
        reference = total
    elif op == "Average":
        reference = total / n
    elif op == "Product":
        reference = total * np.prod(np.delete(values, rank, 0), 0)
    else:
        holds = values == NUMPY[op](values, axis=0)
        reference = total * holds[rank] / holds.sum(0)
    np.testing.assert_allclose(gradient, reference)
