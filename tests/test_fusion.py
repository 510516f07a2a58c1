"""The planner and packer: pure functions, no ranks needed."""

from __future__ import annotations

import numpy as np
import pytest

from hvdx import fusion

F32, F64, I8 = np.dtype("float32"), np.dtype("float64"), np.dtype("int8")


def test_reverse_order_and_alignment() -> None:
    plan = fusion.plan([(3,), (17, 2), ()], [F32] * 3, threshold=1 << 20)
    [bucket] = plan.buckets
    assert [slot.index for slot in bucket.slots] == [2, 1, 0]
    assert [slot.offset for slot in bucket.slots] == [0, 64, 64 + 192]  # 4 -> 64, 17*2*4 = 136 -> 192
    assert bucket.nbytes == 64 + 192 + 64


@pytest.mark.parametrize(("elements", "buckets"), [(0, 1), (15, 1), (16, 1), (17, 2), (1000, 2)])
def test_threshold_is_the_largest_buffer(elements: int, buckets: int) -> None:
    """T bytes fit in a buffer of T, T + 1 do not, and what is larger than T travels alone."""
    plan = fusion.plan([(16,), (elements,)], [F32] * 2, threshold=128)
    assert len(plan.buckets) == buckets
    assert sum(len(bucket.slots) for bucket in plan.buckets) == 2
    for bucket in plan.buckets:
        assert bucket.nbytes <= 128 or len(bucket.slots) == 1


def test_zero_threshold_sends_every_tensor_alone() -> None:
    plan = fusion.plan([(1,), (1,), (1,)], [F32] * 3, threshold=0)
    assert [[slot.index for slot in bucket.slots] for bucket in plan.buckets] == [[2], [1], [0]]


def test_dtypes_never_share_a_buffer() -> None:
    plan = fusion.plan([(4,)] * 4, [F32, I8, F64, F32], threshold=1 << 20)
    assert {bucket.dtype for bucket in plan.buckets} == {F32, I8, F64}
    assert [bucket.slots[0].index for bucket in plan.buckets] == [3, 2, 1]


def test_plan_depends_on_nothing_else() -> None:
    arguments = ([(5, 5), (0, 3), (7,)], [F32, F32, F64], 100)
    assert fusion.plan(*arguments) == fusion.plan(*arguments)


@pytest.mark.parametrize("threshold", [0, 100, 1 << 20])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_pack_and_unpack_are_inverse(threshold: int, scale: float | None) -> None:
    rng = np.random.default_rng(0)
    shapes = [(3, 5), (), (0, 4), (64,), (2, 2, 2)]
    tensors = [
        rng.normal(size=shape).astype(dtype) for shape, dtype in zip(shapes, [F32, F64, F32, F32, F64], strict=True)
    ]
    plan = fusion.plan([t.shape for t in tensors], [t.dtype for t in tensors], threshold)
    buffers = []
    for bucket in plan.buckets:
        buffer = np.full(bucket.nbytes, 255, np.uint8)
        fusion.pack(bucket, tensors, buffer, scale)
        buffers.append(buffer)
    for tensor, result in zip(tensors, fusion.unpack(plan, buffers), strict=True):
        np.testing.assert_array_equal(result, tensor * tensor.dtype.type(scale or 1))
        assert result.base is not None or result.size == 0  # a view, not a copy


def test_padding_is_zero() -> None:
    [bucket] = fusion.plan([(3,)], [F32], 1 << 20).buckets
    buffer = np.full(bucket.nbytes, 255, np.uint8)
    fusion.pack(bucket, [np.ones(3, F32)], buffer)
    assert not buffer[12:].any()


def test_describe_names_every_tensor() -> None:
    text = fusion.plan([(3, 4), ()], [F32, F64], 1 << 20).describe(["dense/kernel", "scale"])
    assert "2 buffer(s)" in text
    assert "dense/kernel 3x4" in text
    assert "scale scalar" in text
