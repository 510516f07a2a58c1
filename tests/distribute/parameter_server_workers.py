"""What the scenes of the parameter server's tests share: who this worker is, and its clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdx.distribute.parameter_server import ParameterClient


@dataclass
class Worker:
    """This worker of the job.

    Args:
        index: its number.
        count: how many there are.
        addresses: of the servers.
        token: of the job.
        folder: where all members of the job may write.
    """

    index: int
    count: int
    addresses: list[str]
    token: str
    folder: Path
    clients: list[ParameterClient] = field(default_factory=list)

    def client(self, group: str, **options: Any) -> ParameterClient:
        """Return a client for a model of that name."""
        made = ParameterClient(self.addresses, self.index, self.count, self.token, group=group, **options)
        self.clients.append(made)
        return made

    def goodbye(self) -> None:
        """Tell the servers that this worker has finished the job."""
        self.client("goodbye").close()
