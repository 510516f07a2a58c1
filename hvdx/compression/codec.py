"""The contract of a codec: any object with `compress` and `decompress` will do, Horovod's classes included."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Codec(Protocol):
    """Turns a tensor into what travels, and back."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor that travels and what `decompress` needs to know."""

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its first dtype."""
