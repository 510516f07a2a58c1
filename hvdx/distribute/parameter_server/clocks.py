"""How far each worker is, as a server counts: clocks, who is still there, staleness, duplicates. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Worker:
    """One worker as one server sees it.

    Args:
        clock: pushes that have been accepted; the next one has this number.
        version: what version of the parameters its next push was computed with.
        dropped: pushes that were not applied, as a gradient was not finite.
        duplicates: pushes that came again and were not applied again.
        staleness: by how many steps it led the slowest worker, at most.
        lag: how many updates there were between its pull and the push computed from it, at most.
        gone: why it does not count any more: "" while it does, "finished", or what happened to it.
    """

    clock: int = 0
    version: int = 0
    dropped: int = 0
    duplicates: int = 0
    staleness: int = 0
    lag: int = 0
    gone: str = ""


@dataclass
class Clocks:
    """All workers of a group, and what has been done with their pushes."""

    workers: list[Worker]
    updates: int = 0
    applied: int = 0
    skipped: int = 0

    @classmethod
    def of(cls, count: int) -> Clocks:
        """Return the clocks of that many workers, at zero."""
        return cls([Worker() for _ in range(count)])

    def live(self) -> list[int]:
        """Return the workers that still count."""
        return [number for number, worker in enumerate(self.workers) if not worker.gone]

    def slowest(self) -> int:
        """Return the lowest clock of those that still count; of all, where none does."""
        return min(self.workers[number].clock for number in (self.live() or range(len(self.workers))))

    def lead(self, worker: int) -> int:
        """Return by how many steps a worker leads the slowest."""
        return max(0, self.workers[worker].clock - self.slowest())

    def behind(self, clock: int) -> list[int]:
        """Return the workers that still count and have not reached a clock."""
        return [number for number in self.live() if self.workers[number].clock < clock]

    def accept(self, worker: int, clock: int, version: int, now: int) -> bool:
        """Count a push; return False for one that has been accepted before.

        Args:
            worker: who pushes.
            clock: the number of the push.
            version: the version of the parameters that it was computed with.
            now: the version at present.

        Raises:
            ValueError: a push is missing in between.
        """
        state = self.workers[worker]
        if clock < state.clock:
            state.duplicates += 1
            return False
        if clock > state.clock:
            raise ValueError(f"worker {worker} pushes number {clock}, and number {state.clock} has not come")
        state.staleness = max(state.staleness, self.lead(worker))
        state.lag = max(state.lag, now - version)
        state.clock += 1
        return True

    def leave(self, worker: int, why: str) -> bool:
        """Note that a worker does not count any more; return whether that is news."""
        news = not self.workers[worker].gone
        if news:
            self.workers[worker].gone = why
        return news

    def stats(self) -> dict[str, Any]:
        """Return all counters as plain data."""
        return {
            "pushes": sum(worker.clock for worker in self.workers),
            "updates": self.updates,
            "gradients_applied": self.applied,
            "dropped": sum(worker.dropped for worker in self.workers),
            "skipped_updates": self.skipped,
            "duplicates": sum(worker.duplicates for worker in self.workers),
            "greatest_staleness": max(worker.staleness for worker in self.workers),
            "greatest_lag": max(worker.lag for worker in self.workers),
            "workers": [asdict(worker) for worker in self.workers],
        }


def named(workers: Iterable[int]) -> str:
    """Return for example `workers 1, 3`."""
    listed = sorted(workers)
    return f"worker{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed)) or '?'}"
