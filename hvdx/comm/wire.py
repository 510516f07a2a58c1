"""Putting tensors into dtypes a library's ops take, and back: by bits where data moves, by value in a reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.comm.reduce_op import ReduceOp

_BITS = {
    tf.bool: tf.uint8, tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64,
    tf.complex128: tf.float64,
}  # fmt: skip
_PARTS = {tf.complex64: tf.float32, tf.complex128: tf.float64}
_TOP_BIT = np.int64(-(2**63))


@dataclass(frozen=True)
class Wired:
    """A tensor as it travels.

    Args:
        tensor: what travels.
        restore: what makes the result of what comes back.
        divide: whether `tensor` has to be divided by the number of ranks on the way; only floating-point numbers.
    """

    tensor: Any
    restore: Callable[[Any], Any]
    divide: bool = False


def moving(tensor: Any, taken: frozenset[Any]) -> Wired:
    """Return a tensor as bits of a dtype in `taken`; the first dimension stays, complex128 gets one more at the end."""
    dtype = tensor.dtype
    if dtype in taken:
        return Wired(tensor, lambda back: back)
    if dtype == tf.bool:
        return Wired(tf.cast(tensor, tf.uint8), lambda back: tf.cast(back, tf.bool))
    return Wired(tf.bitcast(tensor, _BITS[dtype]), lambda back: tf.bitcast(back, dtype))


def reducible(tensor: Any, op: ReduceOp, taken: frozenset[Any], size: int) -> Wired:
    """Return a tensor as one of a dtype in `taken` that is reduced to the same value by Sum, Min, Max or Product.

    An Average of integers is summed in 64 bits and divided after; of floating-point numbers, divided before.
    """
    dtype = tensor.dtype
    average = op is ReduceOp.AVERAGE
    if dtype.is_complex:
        return Wired(tf.bitcast(tensor, _PARTS[dtype]), lambda back: tf.bitcast(back, dtype), average)
    if dtype.is_floating:
        wire = dtype if dtype in taken else tf.float32
        return Wired(tf.cast(tensor, wire), lambda back: tf.cast(back, dtype), average)
    if dtype == tf.bool:
        return Wired(tf.cast(tensor, tf.int32), lambda back: tf.cast(back, tf.bool))
    if dtype == tf.uint64:
        return _unsigned_64(tensor, op, size)
    if average:
        return Wired(tf.cast(tensor, tf.int64), lambda back: tf.cast(tf.truncatediv(back, _like(size, back)), dtype))
    wire = dtype if dtype in taken else tf.int64
    return Wired(tf.cast(tensor, wire), lambda back: tf.cast(back, dtype))


def _unsigned_64(tensor: Any, op: ReduceOp, size: int) -> Wired:
    """Sums and products have the same bits signed and unsigned; the order is the same with the top bit turned."""
    signed = tf.bitcast(tensor, tf.int64)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return Wired(
            tf.bitwise.bitwise_xor(signed, _TOP_BIT),
            lambda back: tf.bitcast(tf.bitwise.bitwise_xor(back, _TOP_BIT), tf.uint64),
        )
    if op is ReduceOp.AVERAGE:
        return Wired(signed, lambda back: _unsigned_quotient(tf.bitcast(back, tf.uint64), size))
    return Wired(signed, lambda back: tf.bitcast(back, tf.uint64))


def _unsigned_quotient(total: Any, size: int) -> Any:
    return tf.math.floordiv(total, _like(size, total))


def _like(value: int, tensor: Any) -> Any:
    return tf.constant(value, tensor.dtype)


def to_words(flat: Any) -> Any:
    """Return a flat tensor of 1- or 2-byte numbers as int32 words, filled with zeros at the end."""
    per_word = 4 // flat.dtype.size
    padded = tf.pad(flat, [[0, -tf.size(flat) % per_word]])
    return tf.bitcast(tf.reshape(padded, [-1, per_word]), tf.int32)


def from_words(words: Any, dtype: Any) -> Any:
    """Return int32 words (1-d) as the flat tensor that `to_words` made them of, with its padding."""
    return tf.reshape(tf.bitcast(words, dtype), [-1])
