"""What the servers hold of a model as a worker sees it: fetched whole, saved, overwritten, counted."""

from __future__ import annotations

import abc
from collections.abc import Callable
from os import PathLike
from typing import Any

import numpy as np

from hvdx.comm.reduce_op import ReduceOp
from hvdx.distribute.parameter_server import states
from hvdx.distribute.parameter_server.collective import Collective
from hvdx.distribute.parameter_server.link import Link
from hvdx.distribute.parameter_server.placement import Placement
from hvdx.errors import WorldError


class Held(Collective, abc.ABC):
    """The part of a worker's client that is about the servers' state.

    Args:
        link: the connections.
        worker: this worker's number.
    """

    def __init__(self, link: Link, worker: int) -> None:
        super().__init__(link)
        self.worker = worker
        self._spec: dict[str, Any] = {}
        self._finalized = 0

    @abc.abstractmethod
    def pull(self) -> list[np.ndarray]:
        """Return the newest parameters."""

    @abc.abstractmethod
    def _registered(self) -> Placement:
        """Return where the pieces are."""

    @abc.abstractmethod
    def _settle(self) -> None:
        """Wait until the servers have taken the push before."""

    @abc.abstractmethod
    def _forget(self) -> None:
        """Ask anew for parameters, where some are on their way."""

    def state(self) -> states.State:
        """Return everything the servers hold, whole."""
        self._settle()
        replies = self._link.wait([self._link.request(server, "state", {}) for server in self._servers])
        return states.joined(self._registered(), [(reply.header["about"], reply.arrays) for reply in replies])

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything the servers hold to one file; worker 0 writes, the others may call it too.

        Raises:
            OSError: it cannot be written; what was there before still is.
        """
        if self.worker == 0:
            states.write(path, self.state(), self._spec)

    def restore(self, path: str | PathLike[str]) -> list[np.ndarray]:
        """Overwrite what the servers hold with a saved state, and return the parameters; all workers call it.

        The number of servers and the size of pieces may be others than when it was saved.

        Raises:
            CheckpointError: the file cannot be read, or is of another model or optimizer.
        """
        return self.load(lambda: states.read(path, self._spec))

    def load(self, make: Callable[[], states.State | None]) -> list[np.ndarray]:
        """Overwrite what the servers hold, unless it is None, and return the parameters; all workers call it.

        Args:
            make: returns the state; called on worker 0 only.
        """
        self._registered()
        self._settle()
        failure: Exception | None = None
        if self.worker == 0:
            try:
                self.give(make())
            except Exception as error:  # the others wait, and must hear of it first
                failure = error
        [failed] = self.push_pull([np.array([failure is not None], np.int32)], ReduceOp.MAX, "restore")
        if failure is not None:
            raise failure
        if failed[0]:
            raise WorldError("Worker 0 could not give the servers a saved state; its own output says why.")
        self._forget()
        return self.pull()

    def give(self, state: states.State | None) -> None:
        """Overwrite what the servers hold, unless it is None; one worker calls it."""
        parts = states.split(self._registered(), state) if state is not None else []
        self._settle()
        self._link.wait(
            [
                self._link.request(server, "load", {"about": about}, arrays)
                for server, (about, arrays) in enumerate(parts)
            ]
        )
        self._forget()

    def stats(self) -> list[dict[str, Any]]:
        """Return each server's counters."""
        self._settle()
        replies = self._link.wait([self._link.request(server, "stats", {}) for server in self._servers])
        return [reply.header["stats"] for reply in replies]

    def finalize(self) -> None:
        """Let the averages of the parameters (EMA) become the parameters, as Keras does at the end; collective."""
        self._settle()
        self.barrier()
        if self.worker == 0:
            self._link.wait(
                [self._link.request(server, "finalize", {"number": self._finalized}) for server in self._servers]
            )
        self._finalized += 1
        self.barrier()
