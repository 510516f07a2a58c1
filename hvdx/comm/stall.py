"""Who is missing, when a wait has become too long: ranks that wait say so to each other; who says nothing is named."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from hvdx import environment
from hvdx.comm.agreement import Agreement
from hvdx.comm.deadline import EXIT_CODE
from hvdx.comm.mpi_library import MPI
from hvdx.logs import log

_TAG = 7


class Notes:
    """The notes of one wait: "I wait in call number n", sent to all, and those that came back.

    Args:
        comm: an mpi4py communicator for nothing else.
        sequence: the number of the call.
    """

    def __init__(self, comm: Any, sequence: int) -> None:
        self._comm = comm
        self._sequence = sequence
        self._seen = {comm.Get_rank()}
        self._told: set[int] = set()
        self._pending: list[tuple[Any, np.ndarray]] = []
        for rank in range(comm.Get_size()):
            self._tell(rank)

    def _tell(self, rank: int) -> None:
        if rank != self._comm.Get_rank() and rank not in self._told:
            self._told.add(rank)
            note = np.array([self._sequence], np.int64)
            self._pending.append((self._comm.Isend(note, rank, _TAG), note))

    def answer(self) -> None:
        """Read the notes that have come."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _TAG, status):
            note = np.empty(1, np.int64)
            self._comm.Recv(note, status.Get_source(), _TAG)
            if note[0] >= self._sequence:
                self._seen.add(status.Get_source())

    def missing(self) -> list[int]:
        """Return the ranks that have not said that they wait too."""
        self.answer()
        return [rank for rank in range(self._comm.Get_size()) if rank not in self._seen]


def asked(comm: Any) -> bool:
    """Return whether another rank has said that it waits."""
    return bool(comm.Iprobe(MPI.ANY_SOURCE, _TAG))


def find_missing(comm: Any, sequence: int) -> Notes:
    """Start asking who else waits in call `sequence`."""
    return Notes(comm, sequence)


class Watchdog:
    """A thread that ends this process when a blocking MPI call takes longer than HVDX_TIMEOUT.

    The ranks have agreed on the call just before, so such a call hangs only when a rank stopped or died in the middle
    of it, and no exception can be raised in the thread that is inside MPI.

    Args:
        comm: an mpi4py communicator for the notes.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._since: float | None = None
        self._agreement: Agreement | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(self, agreement: Agreement) -> Iterator[None]:
        """Watch the block."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdx-watchdog", daemon=True)
            self._thread.start()
        self._agreement = agreement
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        limit = environment.TIMEOUT.read()
        while not self._stop.wait(min(1.0, limit / 4)):
            limit = environment.TIMEOUT.read()
            since = self._since
            if since is not None and time.monotonic() - since > limit and self._agreement is not None:
                self._leave(self._agreement, limit)

    def _leave(self, agreement: Agreement, limit: float) -> None:
        notes = find_missing(self._comm, agreement.sequence)
        end = time.monotonic() + min(5.0, limit)
        while notes.missing() and time.monotonic() < end:
            time.sleep(0.05)
        if self._since is None:
            return
        missing = notes.missing()
        who = "ranks " + ", ".join(map(str, missing)) if missing else "a rank"
        log.error(
            "%s stopped in the middle of: %s. Waited %g s (HVDX_TIMEOUT); this rank ends.",
            who,
            agreement.last,
            limit,
        )
        sys.stderr.flush()
        os._exit(EXIT_CODE)
