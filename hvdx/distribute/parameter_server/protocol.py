"""What travels between workers and servers: a header of plain JSON, then raw arrays; never code."""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from hvdx import errors
from hvdx.errors import CollectiveError, HvdxError, MissingDependencyError

try:
    import zmq
except ImportError:
    raise MissingDependencyError(
        "The parameter server needs the package pyzmq: install hvdx with its extra, hvdx[parameter-server]."
    ) from None

__all__ = ["Message", "error_of", "pack", "socket", "unpack", "zmq"]


@dataclass(frozen=True)
class Message:
    """A header, and the arrays that belong to it."""

    header: dict[str, Any]
    arrays: list[np.ndarray] = field(default_factory=list)


def pack(header: dict[str, Any], arrays: Sequence[Any] = ()) -> list[Any]:
    """Return the frames of a message; arrays that lie in one piece are not copied."""
    solid = [np.ascontiguousarray(array).reshape(np.shape(array)) for array in arrays]
    full = {**header, "arrays": [[array.dtype.name, list(array.shape)] for array in solid]}
    return [json.dumps(full).encode(), *(array.reshape(-1).view(np.uint8).data for array in solid)]


def unpack(frames: Sequence[Any]) -> Message:
    """Return the message of these frames; its arrays are read-only views of them.

    Raises:
        ValueError: they are no message.
    """
    header = json.loads(bytes(frames[0].buffer))
    if not isinstance(header, dict) or len(header.get("arrays", ())) != len(frames) - 1:
        raise ValueError("the header does not fit the frames")
    arrays = [
        np.frombuffer(frame.buffer, dtype_of(name)).reshape(shape)
        for frame, (name, shape) in zip(frames[1:], header.pop("arrays"), strict=True)
    ]
    return Message(header, arrays)


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of that name."""
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def admits(header: dict[str, Any], token: str) -> bool:
    """Return whether a message is of this job."""
    return hmac.compare_digest(str(header.get("token", "")).encode(), token.encode())


def error_of(header: dict[str, Any]) -> HvdxError | None:
    """Return the error that a server answered with, or None."""
    if "error" not in header:
        return None
    cls = getattr(errors, str(header.get("kind")), CollectiveError)
    return cls(header["error"]) if isinstance(cls, type) and issubclass(cls, HvdxError) else None


def socket(context: zmq.Context, kind: int) -> zmq.Socket:
    """Return a socket that neither drops nor blocks, and does not keep its process alive for long."""
    made = context.socket(kind)
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.LINGER, 2000)
    made.setsockopt(zmq.TCP_KEEPALIVE, 1)
    return made
