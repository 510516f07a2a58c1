"""What counts as the same call, and what the ranks are told when it is not."""

from __future__ import annotations

import numpy as np

from hvdx.comm.signature import HEADER_LENGTH, Signature, TensorSpec, agrees, header, mismatch, words
from hvdx.errors import GradientError, MismatchError


def reduce_of(*specs: tuple[str, tuple[int, ...], str], missing: tuple[tuple[int, str], ...] = ()) -> Signature:
    return Signature("allreduce", "gradients", tuple(TensorSpec(*spec) for spec in specs), "Average", missing)


def report(*signatures: Signature) -> Exception:
    headers = np.stack([header(signature, 9) for signature in signatures])
    assert headers.shape == (len(signatures), HEADER_LENGTH)
    assert not agrees(headers)
    return mismatch(np.stack([words(signature) for signature in signatures]), headers)


def test_counters_in_names_do_not_matter_but_names_do() -> None:
    first = reduce_of(("sequential/dense_1/kernel", (3,), "float32"))
    assert first.digest == reduce_of(("sequential_4/dense_7/kernel", (3,), "float32")).digest
    assert first.digest != reduce_of(("sequential/conv/kernel", (3,), "float32")).digest


def test_shape_dtype_kind_and_operation_matter() -> None:
    base = reduce_of(("a", (3,), "float32"))
    others = [
        reduce_of(("a", (4,), "float32")),
        reduce_of(("a", (3,), "float64")),
        reduce_of(),
        Signature("allreduce", "gradients", base.tensors, "Sum"),
        Signature("broadcast", "gradients", base.tensors, "Average"),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_both_sides_are_told_in_words() -> None:
    error = report(
        reduce_of(("dense/kernel", (8, 16), "float32"), ("dense/bias", (16,), "float32")),
        Signature("allgather", "metrics at the end of epoch 2"),
    )
    assert isinstance(error, MismatchError)
    assert "rank 0: allreduce (Average) of 2 gradients (dense/kernel 8x16 float32, dense/bias 16 float32)" in str(error)
    assert "rank 1: allgather: metrics at the end of epoch 2" in str(error)


def test_equal_ranks_are_listed_together() -> None:
    same = reduce_of(("a", (), "float32"))
    assert "ranks 0, 2: allreduce" in str(report(same, Signature("barrier", ""), same))


def test_a_missing_gradient_names_variable_and_ranks() -> None:
    error = report(
        reduce_of(("a", (3,), "float32"), ("b", (3,), "float32")),
        reduce_of(("a", (3,), "float32"), missing=((1, "b"),)),
    )
    assert isinstance(error, GradientError)
    assert "b: no gradient on rank 1, a gradient on rank 0" in str(error)
    assert "missing_gradients='zeros'" in str(error)


def test_long_descriptions_are_cut() -> None:
    long = reduce_of(*[(f"layer_with_a_long_name_{i}/kernel" * 9, (i,), "float32") for i in range(400)])
    assert words(long).nbytes == words(reduce_of()).nbytes
    assert "and 376 more" in long.describe()


def test_the_place_of_a_missing_tensor_counts_where_names_differ_in_counters_only() -> None:
    first = reduce_of(("dense_6/kernel", (3,), "float32"), missing=((0, "dense_5/kernel"),))
    second = reduce_of(("dense_5/kernel", (3,), "float32"), missing=((1, "dense_6/kernel"),))
    assert first.digest != second.digest
    assert isinstance(report(first, second), GradientError)


def test_what_a_call_is_for_counts() -> None:
    assert Signature("allgather", "metrics").digest != Signature("allgather", "a checkpoint").digest
