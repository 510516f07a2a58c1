"""Sending a tensor from one rank to another by MPI, with its dtype and shape in front and a limit on every wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdx import environment
from hvdx.comm.mpi_library import MPI
from hvdx.errors import MismatchError, StallError, UnsupportedError

_HEADER = 16
_MOST_DIMENSIONS = _HEADER - 2
_PIECE = 1 << 30


class PointToPoint:
    """Messages on a communicator of their own. A message is a header (a hash of dtype, rank, shape) and the bytes.

    Args:
        comm: an mpi4py communicator for nothing else.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def send(self, array: np.ndarray, destination: int, tag: int) -> None:
        """Send an array; returns when the receiver has it or MPI has buffered it.

        Raises:
            StallError: the receiver did not take it within HVDX_TIMEOUT.
            UnsupportedError: it has more than 14 dimensions.
        """
        if array.ndim > _MOST_DIMENSIONS:
            raise UnsupportedError(
                f"send takes tensors of at most {_MOST_DIMENSIONS} dimensions. Received: {array.ndim}. Reshape it."
            )
        header = np.zeros(_HEADER, np.int64)
        header[:2] = _dtype_code(array.dtype), array.ndim
        header[2 : 2 + array.ndim] = array.shape
        raw = array.reshape(-1).view(np.uint8)
        requests = [self.comm.Isend(header, destination, tag)]
        requests += [self.comm.Isend(raw[i : i + _PIECE], destination, tag) for i in range(0, raw.size, _PIECE)]
        what = f"send of {_words(array.dtype, array.shape)} to rank {destination} (tag {tag})"
        _wait(requests, what, f"rank {destination} did not receive it")

    def recv(self, dtype: np.dtype, shape: Sequence[int | None] | None, source: int, tag: int) -> np.ndarray:
        """Receive an array.

        Args:
            dtype: what is expected.
            shape: what is expected; None where a dimension, or the whole shape, may be anything.

        Raises:
            MismatchError: something else came; names both.
            StallError: nothing came within HVDX_TIMEOUT.
        """
        header = np.empty(_HEADER, np.int64)
        what = f"recv of {_words(dtype, shape)} from rank {source} (tag {tag})"
        _wait([self.comm.Irecv(header, source, tag)], what, f"rank {source} sent nothing")
        came = tuple(int(n) for n in header[2 : 2 + int(header[1])])
        result = np.empty(int(np.prod(came, dtype=np.int64)) * _itemsize(int(header[0])), np.uint8)
        requests = [self.comm.Irecv(result[i : i + _PIECE], source, tag) for i in range(0, result.size, _PIECE)]
        _wait(requests, what, f"rank {source} stopped in the middle of it")
        fits = shape is None or (
            len(shape) == len(came) and all(a is None or a == b for a, b in zip(shape, came, strict=True))
        )
        if header[0] != _dtype_code(dtype) or not fits:
            raise MismatchError(
                f"{what}: rank {source} sent {_words(_DTYPES[int(header[0])], came)}. "
                "Give recv the dtype and shape that is sent."
            )
        return result.view(dtype).reshape(came)


def _all_dtypes() -> list[np.dtype]:
    import ml_dtypes

    names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
    return [np.dtype(name) for name in names.split()] + [np.dtype(ml_dtypes.bfloat16)]


_DTYPES = _all_dtypes()


def _dtype_code(dtype: np.dtype) -> int:
    return _DTYPES.index(np.dtype(dtype))


def _itemsize(code: int) -> int:
    return _DTYPES[code].itemsize


def _words(dtype: np.dtype, shape: Sequence[int | None] | None) -> str:
    if shape is None:
        return f"{dtype.name} of any shape"
    return f"{dtype.name} " + ("x".join("?" if n is None else str(n) for n in shape) or "scalar")


def _wait(requests: list[Any], what: str, reason: str) -> None:
    limit = environment.TIMEOUT.read()
    start, pause = time.monotonic(), 20e-6
    while not MPI.Request.Testall(requests):
        time.sleep(pause)
        pause = min(pause * 1.5, 1e-3)
        if time.monotonic() - start > limit:
            raise StallError(f"{what}: {reason} within {limit:g} s (HVDX_TIMEOUT).")
