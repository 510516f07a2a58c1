"""What `hvd.shard` was asked for, checked, and the seeds that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdx.errors import ConfigurationError


@dataclass(frozen=True)
class ShardOptions:
    """The arguments of `hvd.shard` (see there) and who asks.

    Raises:
        ConfigurationError: an argument cannot be used; names it.
    """

    batch_size: int | None
    shuffle: bool
    seed: int
    buffer_size: int | None
    drop_remainder: bool
    initial_epoch: int
    rank: int
    size: int

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            _check_integer("batch_size", self.batch_size, 1, self._hint_for_batch_size())
        _check_integer("seed", self.seed, 0)
        _check_integer("initial_epoch", self.initial_epoch, 0)
        if self.buffer_size is not None:
            _check_integer("buffer_size", self.buffer_size, 1)
        for name in ("shuffle", "drop_remainder"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ConfigurationError(f"hvd.shard: {name} is True or False. Received: {getattr(self, name)!r}.")

    def _hint_for_batch_size(self) -> str:
        if hasattr(self.batch_size, "shape") and getattr(self.batch_size, "shape", ()) != ():
            return " Inputs and targets go together in one argument: hvd.shard((x, y), batch_size=...)."
        return ""

    def random_state(self, epoch: int) -> list[int]:
        """Return what seeds this rank's order of an epoch."""
        return [int(self.seed), epoch, self.rank]


def _check_integer(name: str, value: Any, least: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        text = repr(value) if len(repr(value)) < 80 else type(value).__name__
        raise ConfigurationError(f"hvd.shard: {name} is an integer, {least} or more. Received: {text}.{hint}")
