"""A collective of a native communicator, apart from how it is run: what it is, its number, its fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.comm.communicator import Label
from hvdx.comm.first_batch import fingerprint
from hvdx.comm.signature import Signature, TensorSpec


@dataclass(frozen=True)
class Call:
    """A collective, but for its tensors.

    Args:
        kind, detail, label: as in a signature.
        build: makes the payload of the tensors and the numbers (see `NativeCommunicator._agree`).
        parameters: what `build` depends on besides shapes and dtypes.
        ragged: whether the first dimension may differ between ranks.
        threshold: bytes of a fusion buffer.
        watch: whether fingerprints are still to be compared; a list of one, since it changes.
    """

    kind: str
    detail: str
    label: Label
    build: Callable[[list[Any], Any], list[Any]] = field(compare=False)
    parameters: tuple[Any, ...] = ()
    ragged: bool = False
    threshold: int = 0
    watch: list[bool] = field(default_factory=lambda: [False], compare=False)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape as the ranks compare it."""
        return (-1, *shape[1:]) if self.ragged else tuple(shape)

    def signature(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[np.dtype]) -> Signature:
        """Return the signature of this call on tensors of these shapes and dtypes."""
        specs = (
            TensorSpec(self.label.name(i), self.shape(shape), dtype.name)
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        )
        return Signature(self.kind, self.label.what, tuple(specs), self.detail, self.label.missing)


class Keys:
    """Numbers for collectives: the same call has the same number on every rank and every time.

    Every rank meets the calls in the same order, so counting is enough.
    """

    FIRST = 16

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}
        self._next = self.FIRST

    def of(self, call: tuple[Any, ...], count: int) -> int:
        """Return the first of `count` numbers of a call."""
        if call not in self._known:
            self._known[call] = self._next
            self._next += max(1, count)
        return self._known[call]


def as_array(tensor: Any) -> np.ndarray:
    """Return an eager tensor's values, or an array itself; also of dtypes that only TensorFlow's conversion knows."""
    return np.asarray(tensor.numpy() if hasattr(tensor, "numpy") else tensor)


def numpy_dtype_of(tensor: Any) -> np.dtype:
    """Return the numpy dtype of a tensor or array."""
    return np.dtype(getattr(tensor.dtype, "as_numpy_dtype", tensor.dtype))


def without_empty(values: list[Any], function: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Apply `function` to the tensors that have elements; the others are what they are on every rank."""
    full = [value for value in values if value.shape.num_elements() > 0]
    results = iter(function(full) if full else [])
    return [next(results) if value.shape.num_elements() > 0 else tf.identity(value) for value in values]


def fingerprint_op(call: Call, tensors: list[Any]) -> Any:
    """Return the fingerprint of the tensors while it is still wanted, else 0; they are not copied for nothing."""
    zero = tf.constant(0, tf.int64)
    if not call.watch[0]:
        return zero

    @tf.autograph.experimental.do_not_convert
    def is_wanted() -> np.bool_:
        return np.bool_(call.watch[0])

    wanted = tf.numpy_function(is_wanted, [], tf.bool, stateful=True)
    wanted.set_shape([])

    def compute() -> Any:
        mark = tf.numpy_function(_fingerprint_of, tensors, tf.int64)
        mark.set_shape([])
        return mark

    return tf.cond(wanted, compute, lambda: zero)


@tf.autograph.experimental.do_not_convert
def _fingerprint_of(*arrays: np.ndarray) -> np.int64:
    return np.int64(fingerprint([np.asarray(array) for array in arrays]))
