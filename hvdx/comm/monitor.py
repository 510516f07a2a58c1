"""A thread that says for whom a rank waits, and ends the process when a library's op does not come back in time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from hvdx import environment
from hvdx.comm.agreement import Agreement, Waiting
from hvdx.comm.roster import Roster
from hvdx.comm.signature import Signature
from hvdx.errors import StallError
from hvdx.logs import log

EXIT_CODE = 75
"""Exit code of a rank whose payload never ended (EX_TEMPFAIL of sysexits.h)."""
_GRACE = 10.0
"""Seconds after the limit in which the library may still notice by itself, so that an exception can be raised."""


class Monitor:
    """Watches waits for an agreement, and payloads.

    Args:
        roster: whom to ask.
        agreement: gets the error when a payload is late.
    """

    def __init__(self, roster: Roster, agreement: Agreement) -> None:
        self._roster = roster
        self._agreement = agreement
        self._waiting: Waiting | None = None
        self._payload: tuple[Signature, int, float] | None = None
        self._warn_at = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self, waiting: Waiting) -> Iterator[None]:
        """Watch a wait for the other ranks."""
        self._start()
        self._warn_at = environment.STALL_WARNING.read()
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None

    def begin(self, signature: Signature) -> None:
        """Note that the payload of a call begins."""
        self._payload = (signature, self._agreement.sequence, time.monotonic())

    def end(self) -> None:
        """Note that it has ended."""
        self._payload = None

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdx-monitor", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, environment.TIMEOUT.read() / 4)):
            waiting = self._waiting
            if waiting is not None and waiting.seconds > self._warn_at:
                self._warn_at = 2 * max(self._warn_at, waiting.seconds)
                log.warning("waiting: %s", waiting.describe(self._roster.missing(waiting.sequence)))
            payload = self._payload
            limit = environment.TIMEOUT.read()
            if payload is not None and time.monotonic() - payload[2] > limit:
                self._late(payload, limit)

    def _late(self, payload: tuple[Signature, int, float], limit: float) -> None:
        signature, sequence, start = payload
        if self._agreement.error is None:
            who = ranks(self._roster.missing(sequence))
            if self._payload is not payload:
                return
            text = f"{who} stopped in the middle of: {signature.describe()}. Waited {limit:g} s (HVDX_TIMEOUT)."
            self._agreement.error = StallError(text)
            log.error("%s", text)
        if self._payload is payload and time.monotonic() - start > limit + _GRACE:
            log.error("The library does not come back from it; this rank ends.")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_CODE)


def ranks(missing: Sequence[int]) -> str:
    """Return for example `ranks 1, 2`."""
    if not missing:
        return "a rank"
    return ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
