"""No compression: the tensor travels as it is."""

from __future__ import annotations

from typing import Any


class NoneCodec:
    """Changes nothing."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the tensor itself."""
        return tensor

    def __repr__(self) -> str:
        return "hvd.Compression.none"
