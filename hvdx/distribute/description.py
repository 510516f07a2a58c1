"""What a strategy has resolved to, in words: which ranks, which devices, which transport, and what of it is stock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdx import world


@dataclass(frozen=True)
class Description:
    """What `describe()` prints.

    Args:
        mode: the strategy's mode.
        replicas: how many replicas train together.
        ranks: processes, and which of them this one is.
        devices: where this process's replicas live.
        transport: how gradients move.
        made_by: whose classes do it.
    """

    mode: str
    replicas: int
    ranks: str
    devices: tuple[str, ...]
    transport: str
    made_by: str

    @classmethod
    def of(cls, strategy: Any, mode: str, transport: str, made_by: str) -> Description:
        """Return the description of a strategy.

        Args:
            strategy: a `tf.distribute.Strategy`.
            mode: its mode.
            transport: how gradients move.
            made_by: whose classes do it.
        """
        ranks = f"{world.size()} (this is rank {world.rank()})" if world.is_initialized() else "1"
        devices = tuple(device.rpartition("/device:")[2] or device for device in strategy.extended.worker_devices)
        return cls(mode, strategy.num_replicas_in_sync, ranks, devices, transport, made_by)

    def __str__(self) -> str:
        rows = [
            ("replicas in sync", str(self.replicas)),
            ("ranks", self.ranks),
            ("devices of this rank", ", ".join(self.devices)),
            ("gradients move by", self.transport),
            ("strategy made by", self.made_by),
        ]
        return "\n".join([f"strategy {self.mode}", *(f"  {name}: {value}" for name, value in rows)])
