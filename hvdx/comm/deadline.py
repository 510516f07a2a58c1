"""Calling what cannot be interrupted, with a limit on how long the caller waits for it."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hvdx import environment
from hvdx.logs import log

T = TypeVar("T")


EXIT_CODE = 75
"""Exit code of a process that ends itself since a call below Python never returned (EX_TEMPFAIL of sysexits.h)."""


@contextlib.contextmanager
def start_limit(what: str) -> Iterator[None]:
    """End this process if the block, in which no exception can be raised, takes longer than HVDX_START_TIMEOUT.

    Args:
        what: what is waited for.
    """
    limit = environment.START_TIMEOUT.read()

    def give_up() -> None:
        log.error("waited %g s (HVDX_START_TIMEOUT) for %s: a rank has not started. This rank ends.", limit, what)
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    timer = threading.Timer(limit + 5, give_up)  # later than the limits inside, whose errors name the rank
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class DeadlineThread:
    """One thread that runs functions, one after the other; a function that never returns keeps it for ever."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], list[Any], threading.Event]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """Return what `function` returns, or raise what it raises.

        Raises:
            TimeoutError: it has not returned after `seconds`.
        """
        outcome: list[Any] = []
        done = threading.Event()
        self._jobs.put((function, outcome, done))
        if not done.wait(seconds):
            raise TimeoutError
        ok, value = outcome
        if not ok:
            raise value
        result: T = value
        return result

    def _run(self) -> None:
        while True:
            function, outcome, done = self._jobs.get()
            try:
                outcome += [True, function()]
            except BaseException as error:  # goes to the caller, whatever it is
                outcome += [False, error]
            done.set()
