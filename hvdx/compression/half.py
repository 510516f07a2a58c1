"""16-bit codecs: float32 and float64 travel as float16 or bfloat16.

An average never overflows: it is divided before it is summed, by the mpi communicator in 32 bits. float16 keeps 11 bits
of precision and values up to 65504; bfloat16 keeps 8 bits and the range of float32.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class _CastCodec:
    """Casts floating-point tensors wider than 16 bits to `wire`; leaves all others alone."""

    wire: Any
    name: str

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in 16 bits, and its dtype."""
        if tensor.dtype in (tf.float32, tf.float64):
            return tf.cast(tensor, self.wire), tensor.dtype
        return tensor, None

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the dtype it had."""
        return tensor if ctx is None else tf.cast(tensor, ctx)

    def __repr__(self) -> str:
        return f"hvd.Compression.{self.name}"


class Fp16Codec(_CastCodec):
    """float16 travels."""

    wire = tf.float16
    name = "fp16"


class Bf16Codec(_CastCodec):
    """bfloat16 travels."""

    wire = tf.bfloat16
    name = "bf16"
