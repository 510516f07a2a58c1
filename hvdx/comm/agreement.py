"""The start of every collective: the ranks compare signatures, within a time limit, before any payload moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from hvdx import environment
from hvdx.comm.signature import FAILED, Signature, agrees, header, mismatch, words
from hvdx.errors import CollectiveError, HvdxError, StallError
from hvdx.logs import log

LEAVING = "leaving"
"""The kind of the call with which a rank says that its program has ended."""
_LEAVER_SECONDS = 1.5

Exchange = Callable[[np.ndarray, "Waiting"], np.ndarray]
"""Takes this rank's row (1-d) and who waits for what; returns all ranks' rows (ranks x length)."""


class Waiting:
    """One wait for the other ranks: for what, since when, until when, and what was done last."""

    def __init__(self, signature: Signature, limit: float, last: str, last_time: float, sequence: int) -> None:
        self.signature = signature
        self.limit = limit
        self.sequence = sequence
        self.start = time.monotonic()
        self._last = last
        self._last_time = last_time

    @property
    def seconds(self) -> float:
        """Seconds waited so far."""
        return time.monotonic() - self.start

    def describe(self, missing: list[int] | None) -> str:
        """Return who is missing, for how long, and what that rank last did together with this one."""
        who = (
            "another rank"
            if not missing
            else ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
        )
        return (
            f"{who} did not come to: {self.signature.describe()}. Waited {self.seconds:.0f} s. The last thing done "
            f"together, {time.monotonic() - self._last_time:.0f} s ago, was: {self._last}."
        )


class Agreement:
    """Numbers the collectives of a communicator and compares their signatures.

    Args:
        exchange: moves one row to every rank.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._sequence = 0
        self._last = "the start of the job"
        self._last_time = time.monotonic()
        self.lock = threading.RLock()
        self.error: HvdxError | None = None
        self.patience = 0.0

    @property
    def sequence(self) -> int:
        """The number of the newest call."""
        return self._sequence

    @property
    def last(self) -> str:
        """The newest call on which all ranks agreed, in words."""
        return self._last

    def agree(self, signature: Signature, *extra: int, limit: float | None = None) -> np.ndarray:
        """Wait for all ranks and check that they called the same; collective.

        Args:
            signature: what this rank called.
            extra: up to six integers to tell the other ranks (sizes that may differ).
            limit: seconds to wait; where it is None HVDX_TIMEOUT, or `patience` if that is longer.

        Returns:
            All ranks' headers, ranks x HEADER_LENGTH; `extra` starts at column 2.

        Raises:
            MismatchError: the ranks called different things; raised on every rank.
            StallError: a rank did not come in time.
        """
        if isinstance(self.error, StallError | CollectiveError):
            raise type(self.error)(f"A collective has failed before, so no other can run: {self.error}")
        limit = max(environment.TIMEOUT.read(), self.patience) if limit is None else limit
        self._sequence += 1
        waiting = Waiting(signature, limit, self._last, self._last_time, self._sequence)
        try:
            headers = self._exchange(header(signature, self._sequence, *extra), waiting)
            if not agrees(headers):
                error = mismatch(self._exchange(words(signature), waiting), headers)
                if signature.kind != LEAVING and LEAVING in str(error):
                    # Let the rank that left end first: its exit code is the one that says what happened.
                    time.sleep(_LEAVER_SECONDS)
                raise error
        except HvdxError as error:
            self.error = error
            raise
        self._last, self._last_time = signature.describe(), time.monotonic()
        return headers

    def say_failed(self, cause: str) -> None:
        """Tell the others, whatever they are waiting for, why this rank cannot come."""
        try:
            with self.lock:
                self.agree(Signature(FAILED, cause), limit=environment.SHUTDOWN_TIMEOUT.read())
        except HvdxError as error:
            log.debug("%s", error)

    def say_goodbye(self) -> bool:
        """Tell the others that this rank's program has ended, and wait for theirs; return whether all left together."""
        try:
            with self.lock:
                limit = environment.SHUTDOWN_TIMEOUT.read()
                self.agree(Signature(LEAVING, "the end of the program"), limit=limit)
        except HvdxError as error:
            log.error("%s", error)
            return False
        return True
