"""Whose turn it is, where a v1 graph leaves collectives unordered and the ranks come to different ones first.

Such a collective has a place: a number that it has on every rank. When ranks meet with different places, none of them
is wrong yet: each tells which places its threads are waiting at, and the smallest that all have in common goes next. A
rank that is not there yet waits for the thread that will be.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from hvdx.comm.signature import HEADER_LENGTH

MOST = HEADER_LENGTH - 2
"""Places a rank can tell at a time."""
_SHORTEST, _LONGEST = 0.001, 0.05
"""Seconds between two rounds: other threads of this rank come to their collectives meanwhile."""
_HELD = -1
"""What is at work instead of a thread while a payload moves by operations of the graph."""


class Turns:
    """The threads of one rank that wait for a collective.

    Args:
        lock: is held by whoever calls these methods; given up while a thread waits.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._changed = threading.Condition(lock)
        self._waiting: Counter[int] = Counter()
        self._busy: int | None = None  # the thread that is at work
        self._held = 0
        self._next = 0

    @contextlib.contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Be counted among those that wait at this place; 0 is for a collective that has none."""
        self._waiting[place] += 1
        try:
            yield
        finally:
            self._waiting[place] -= 1
            if self._busy == threading.get_ident():
                self._busy, self._next = None, 0
            self._changed.notify_all()

    def begin(self, place: int, failed: Callable[[], bool], limit: float) -> None:
        """Return when nothing else is at work and nothing is to go before this one, or all failed, or time is over."""
        if self._busy == _HELD and place in (0, self._held):
            self._busy = None  # its session has ended without the rest of it: an error, or nobody wanted the result
        end = time.monotonic() + limit
        while (self._busy is not None or self._next not in (0, place)) and not failed() and time.monotonic() < end:
            self._changed.wait(_LONGEST)
        self._busy = threading.get_ident()

    def hold(self, place: int) -> None:
        """Let the others wait until `release`: the payload of the collective at this place is still to move."""
        self._busy, self._held = _HELD, place

    def release(self) -> None:
        """Let the next one begin."""
        if self._busy == _HELD:
            self._busy = None
            self._changed.notify_all()

    def choose(self, exchange: Callable[[list[int], bool], tuple[np.ndarray, bool]], limit: float) -> bool:
        """Agree with the other ranks on who is next; return whether they did within `limit` seconds.

        Args:
            exchange: tells the places this rank's threads are at, and whether its time is over; returns all ranks'
                places (ranks x MOST, 0 for none) and whether any rank's time is over.
        """
        end, pause = time.monotonic() + limit, _SHORTEST
        while True:
            mine = sorted(place for place, count in self._waiting.items() if place and count)[:MOST]
            rows, late = exchange(mine, time.monotonic() > end)
            if late:
                return False
            common = set.intersection(*(set(row[row != 0].tolist()) for row in rows))
            if common:
                self._next = min(common)
                self._busy = None
                self._changed.notify_all()
                return True
            self._changed.wait(pause)
            pause = min(2 * pause, _LONGEST)
