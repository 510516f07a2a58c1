"""What a strategy has resolved to, in words: which ranks, which devices, which transport, and what of it is stock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdx import world
from hvdx.version import __version__


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
        more: further lines.
    """

    mode: str
    replicas: int
    ranks: str
    devices: tuple[str, ...]
    transport: str
    made_by: str
    more: tuple[str, ...] = ()

    @classmethod
    def of_this_world(
        cls, mode: str, devices: Sequence[str], stock: bool, within: str = "", more: Sequence[str] = ()
    ) -> Description:
        """Return the description of a strategy whose replicas are this world's ranks and their devices.

        Args:
            mode: the mode.
            devices: this rank's.
            stock: whether TensorFlow's own strategy does it.
            within: how values move between devices of one rank.
            more: further lines.
        """
        short = tuple(device.rpartition("/device:")[2] or device for device in devices)
        between = f"{world.communicator().name} between ranks" if world.size() > 1 else ""
        transport = ", ".join(part for part in (within, between) if part) or "none: one replica"
        return cls(
            mode,
            world.size() * len(short),
            f"{world.size()} (this is rank {world.rank()})",
            short,
            transport,
            "stock TensorFlow" if stock else f"hvdx {__version__}",
            tuple(more),
        )

    def __str__(self) -> str:
        rows = [
            ("replicas in sync", str(self.replicas)),
            ("ranks", self.ranks),
            ("devices of this rank", ", ".join(self.devices)),
            ("gradients move by", self.transport),
            ("strategy made by", self.made_by),
        ]
        lines = [f"strategy {self.mode}", *(f"  {name}: {value}" for name, value in rows)]
        return "\n".join([*lines, *(f"  {line}" for line in self.more)])
