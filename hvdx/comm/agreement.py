"""The start of every collective: the ranks compare signatures, within a time limit, before any payload moves."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from hvdx import environment
from hvdx.comm.order import current_place
from hvdx.comm.signature import FAILED, Signature, agrees, header, mismatch, places, unordered, words
from hvdx.comm.turns import Turns
from hvdx.errors import CollectiveError, HvdxError, StallError
from hvdx.logs import log

_CHOICE, _TOO_LATE = Signature("choice", "who is next"), Signature("choice", "too late")
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
        self.turns = Turns(self.lock)
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

    def agree(
        self,
        signature: Signature,
        *extra: int,
        limit: float | None = None,
        prepare: Callable[[], int] | None = None,
    ) -> np.ndarray:
        """Wait for all ranks and check that they called the same; collective. The caller holds the lock.

        Args:
            signature: what this rank called.
            extra: up to five integers to tell the other ranks (sizes that may differ).
            limit: seconds to wait; where it is None HVDX_TIMEOUT, or `patience` if that is longer.
            prepare: is called when it is this call's turn, before the others are told; gives one more integer.

        Returns:
            All ranks' headers, ranks x HEADER_LENGTH; `extra` starts at column 2.

        Raises:
            MismatchError: the ranks called different things; raised on every rank.
            StallError: a rank did not come in time.
        """
        limit = max(environment.TIMEOUT.read(), self.patience) if limit is None else limit
        place = current_place()
        with self.lock, self.turns.at(place):
            try:
                while True:
                    self.turns.begin(place, self._is_over, limit)
                    self._check_alive()
                    waiting = self._wait(signature, limit)
                    told = extra if prepare is None else (*extra, prepare())
                    headers = self._exchange(header(signature, waiting.sequence, *told, place=place), waiting)
                    if agrees(headers):
                        break
                    if not (unordered(headers) and self.turns.choose(self._tell_places(signature, limit), limit)):
                        raise self._difference(signature, headers, waiting)
            except HvdxError as error:
                self.error = error
                raise
            self._last, self._last_time = signature.describe(), time.monotonic()
        return headers

    @contextlib.contextmanager
    def payload(self, signature: Signature) -> Iterator[None]:
        """Run what follows an agreement: who breaks it off can take part in no other, or that would be taken for
        the end of this one."""
        try:
            yield
        except BaseException as error:
            if not self._is_over():
                self.error = CollectiveError(f"{type(error).__name__} broke off {signature.describe()}: {error}")
            raise

    def end(self) -> None:
        """Let no call follow: the world has been left."""
        self.error = CollectiveError(
            "hvd.shutdown() has ended the world for which this was traced. Trace it again after hvd.init(): call "
            "model.compile, or make the tf.function anew."
        )

    @contextlib.contextmanager
    def middle(self) -> Iterator[Waiting]:
        """Give a wait for the others in the middle of the newest call; an error in the block is one for all calls."""
        limit = max(environment.TIMEOUT.read(), self.patience)
        try:
            yield Waiting(Signature("end", self._last), limit, self._last, self._last_time, self._sequence)
        except HvdxError as error:
            self.error = error
            raise

    def _is_over(self) -> bool:
        return isinstance(self.error, StallError | CollectiveError)

    def _check_alive(self) -> None:
        if self._is_over():
            raise type(self.error)(f"A collective has failed before, so no other can run: {self.error}")  # type: ignore[misc]

    def _wait(self, signature: Signature, limit: float) -> Waiting:
        """Return one more wait, which has the next number."""
        self._sequence += 1
        return Waiting(signature, limit, self._last, self._last_time, self._sequence)

    def _tell_places(self, signature: Signature, limit: float) -> Callable[[list[int], bool], tuple[np.ndarray, bool]]:
        def tell(mine: list[int], late: bool) -> tuple[np.ndarray, bool]:
            waiting = self._wait(signature, limit)
            rows = self._exchange(header(_TOO_LATE if late else _CHOICE, waiting.sequence, *mine), waiting)
            return places(rows), bool((rows[:, 0] != _CHOICE.digest).any())

        return tell

    def _difference(self, signature: Signature, headers: np.ndarray, waiting: Waiting) -> HvdxError:
        """Return the error for headers that differ; collective."""
        error = mismatch(self._exchange(words(signature), waiting), headers)
        if signature.kind != LEAVING and LEAVING in str(error):
            # Let the rank that left end first: its exit code is the one that says what happened.
            time.sleep(_LEAVER_SECONDS)
        return error

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
