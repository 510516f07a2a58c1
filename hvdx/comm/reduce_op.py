"""The reduce operations and which dtypes each of them is defined for."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from hvdx.errors import ConfigurationError, UnsupportedError


class ReduceOp(enum.Enum):
    """What an all-reduce computes of the ranks' values, element by element.

    Sum, Average, Product: numbers. Min, Max: real numbers and bool. The average of integers is the exact quotient
    rounded towards zero (it is computed in 64 bits, so narrow integers do not overflow); averages of
    floating-point numbers of 16 bits do not overflow either.
    """

    SUM = "Sum"
    AVERAGE = "Average"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"

    def __repr__(self) -> str:
        return f"hvd.{self.value}"

    @classmethod
    def of(cls, op: Any) -> ReduceOp:
        """Return `op` itself or the operation of that name.

        Raises:
            ConfigurationError: there is no such operation.
        """
        if isinstance(op, cls):
            return op
        if isinstance(op, str):
            for member in cls:
                if member.value.lower() == op.lower():
                    return member
        known = ", ".join(f"hvd.{member.value}" for member in cls)
        raise ConfigurationError(f"There is no reduce operation {op!r}. Use one of {known}.")


UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add, ReduceOp.AVERAGE: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}  # fmt: skip
"""What puts two numbers together; an average is divided besides."""
_LOGICAL = {ReduceOp.MIN, ReduceOp.MAX}
_COMPLEX = {ReduceOp.SUM, ReduceOp.AVERAGE}


def is_half(dtype: np.dtype) -> bool:
    """Return whether `dtype` is float16 or bfloat16."""
    return dtype.name in {"float16", "bfloat16"}


def is_numeric(dtype: np.dtype) -> bool:
    """Return whether hvdx moves and reduces `dtype`: bool, integers, float16 to float64, bfloat16, complex."""
    return dtype.kind in "biufc" or is_half(dtype)


def truncated_quotient(total: np.ndarray, divisor: int) -> np.ndarray:
    """Return 64-bit integers divided by a positive number, rounded towards zero."""
    if total.dtype.kind == "u":
        return total // total.dtype.type(divisor)
    return np.sign(total) * (np.abs(total) // total.dtype.type(divisor))


def require_reducible(dtype: np.dtype, op: ReduceOp) -> None:
    """Check that `op` is defined for `dtype`.

    Raises:
        UnsupportedError: it is not; names both and what to use instead.
    """
    if not is_numeric(dtype):
        raise UnsupportedError(f"allreduce needs numbers. Received: dtype {dtype.name}.")
    if dtype.kind == "b" and op not in _LOGICAL:
        raise UnsupportedError(
            f"allreduce with {op!r} is not defined for bool. Use hvd.Max (logical or), hvd.Min (logical and), "
            "or cast to an integer to count."
        )
    if dtype.kind == "c" and op not in _COMPLEX:
        raise UnsupportedError(f"allreduce with {op!r} is not defined for {dtype.name}. Use hvd.Sum or hvd.Average.")
