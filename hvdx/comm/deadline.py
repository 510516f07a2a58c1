"""Calling what cannot be interrupted, with a limit on how long the caller waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


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
