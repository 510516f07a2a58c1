"""Where the members of a job with servers meet: each tells the scheduler its contact, and learns those of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdx.comm.addresses import Contact
from hvdx.distribute.cluster import Cluster, Role


@dataclass(frozen=True)
class Departure:
    """A member that has left.

    Args:
        role: what it was.
        index: its number among those of its role.
        reason: why, in words: its own ("done"), or "was ended by signal 9 (SIGKILL)".
        orderly: whether it said goodbye, or ended with code 0.
    """

    role: Role
    index: int
    reason: str
    orderly: bool

    def __str__(self) -> str:
        return f"{self.role.value} {self.index}: {self.reason}"


class Members:
    """The members of the job, after all have met.

    Attributes:
        role, index: this member; the scheduler has given a number to a server that came without.
        servers: host:port of every server (the first port of its contact), reachable from everywhere in the job.
        workers: the same of every worker; "" for one that told no port.
    """

    role: Role
    index: int
    servers: tuple[str, ...]
    workers: tuple[str, ...]

    def departures(self) -> tuple[Departure, ...]:
        """Return who has left up to now, in the order of leaving."""
        raise NotImplementedError

    def wait_for_departures(self, known: int, seconds: float) -> tuple[Departure, ...]:
        """Return who has left once they are more than `known`, or after `seconds`."""
        raise NotImplementedError

    def goodbye(self, reason: str = "done") -> None:
        """Leave in good order; to be called once, when this member needs the others no more."""
        raise NotImplementedError


def meet(cluster: Cluster, contact: Contact, on_departure: Callable[[Departure], None] | None = None) -> Members:
    """Tell the scheduler that this member is there, wait for all others, and return them."""
    raise NotImplementedError


def run_scheduler(cluster: Cluster) -> Sequence[Departure]:
    """Be the scheduler (DMLC_ROLE=scheduler) until all members have left; return who left and why."""
    raise NotImplementedError
