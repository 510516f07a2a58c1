"""How workers and servers train together, checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hvdx.distribute.parameter_server.placement import PIECE_BYTES
from hvdx.errors import ConfigurationError

UPDATES = ("synchronous", "asynchronous")


@dataclass(frozen=True)
class Options:
    """See `ParameterClient`.

    Raises:
        ConfigurationError: one of them has no meaning.
    """

    workers: int
    servers: int
    updates: str = "synchronous"
    staleness: int | None = None
    gather: int = 1
    piece_bytes: int = PIECE_BYTES
    average: bool = True

    def __post_init__(self) -> None:
        if self.updates not in UPDATES:
            raise ConfigurationError(f"updates is one of {', '.join(UPDATES)}. Received: {self.updates!r}.")
        for name, least in (("staleness", 0), ("gather", 1), ("piece_bytes", 1)):
            value = getattr(self, name)
            if name == "staleness" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{name} is an integer of {least} or more. Received: {value!r}.")
        if self.updates == "synchronous" and (self.staleness is not None or self.gather != 1):
            raise ConfigurationError(
                "staleness and gather are options of the asynchronous mode: in the synchronous one every update takes "
                f"all workers' gradients. Received: staleness={self.staleness!r}, gather={self.gather!r}."
            )
        if self.gather > self.workers:
            raise ConfigurationError(
                f"gather={self.gather} gradients, and there are {self.workers} worker(s): take at most as many."
            )

    def plain(self) -> dict[str, Any]:
        """Return them as JSON knows them."""
        return asdict(self)
