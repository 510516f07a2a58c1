"""The contract of a codec: any object with `compress` and `decompress` will do, Horovod's classes included."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from hvdx.errors import ConfigurationError


@runtime_checkable
class Codec(Protocol):
    """Turns a tensor into what travels, and back."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor that travels and what `decompress` needs to know."""

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its first dtype."""


def check_codec(codec: Any) -> None:
    """Check that `codec` can compress and decompress.

    Raises:
        ConfigurationError: it cannot; names what there is.
    """
    if not (callable(getattr(codec, "compress", None)) and callable(getattr(codec, "decompress", None))):
        raise ConfigurationError(
            "compression is hvd.Compression.none, fp16 or bf16, or an object with compress and decompress. "
            f"Received: {codec!r}."
        )
