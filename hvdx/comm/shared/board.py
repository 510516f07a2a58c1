"""Where the ranks of a host meet: each posts a row and a number, and rings at those that sleep.

Rounds are counted. What a rank writes before round n lies in the half n % 2 of its area, and is read after round n and
before round n + 1; who comes to round n + 1 has read all of round n, so a half may be written again for n + 2.
"""

from __future__ import annotations

import os
import platform
import select
import threading
from collections.abc import Sequence

import numpy as np

ROW_BYTES = 2048
_COUNTER_BYTES = 64
"""A cache line for each rank's number, so that ranks that look at it do not disturb each other."""
_fence_lock = threading.Lock()
_ORDERED = platform.machine().lower() in {"x86_64", "amd64"}


def fence() -> None:
    """Keep stores and loads before this point before those after it, where the processor does not do so by itself."""
    if not _ORDERED:
        for _ in range(2):
            with _fence_lock:
                pass


def nbytes(ranks: int) -> int:
    """Return how many bytes a board for as many ranks takes."""
    return ranks * (_COUNTER_BYTES + 2 * ROW_BYTES)


class Board:
    """This rank's place at the board.

    Args:
        memory: shared memory of `nbytes(ranks)` bytes, zero at first.
        rank: this rank's place among those of the host.
        bells: an eventfd for each of them; writing to it wakes that rank.
    """

    def __init__(self, memory: np.ndarray, rank: int, bells: Sequence[int]) -> None:
        ranks = len(bells)
        self.round = 0
        self._rank = rank
        split = ranks * _COUNTER_BYTES
        self._counters = memory[:split].data.cast("Q")
        self._places = [r * _COUNTER_BYTES // 8 for r in range(ranks)]
        self._others = [place for r, place in enumerate(self._places) if r != rank]
        rows = memory[split : split + 2 * ranks * ROW_BYTES].reshape(2, ranks, ROW_BYTES)
        self._rows = [rows[0], rows[1]]
        self._bell = bells[rank]
        self._others_bells = [bell for r, bell in enumerate(bells) if r != rank]
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)

    @property
    def half(self) -> int:
        """Which half is written before the next round."""
        return (self.round + 1) & 1

    def post(self, row: np.ndarray | None = None) -> None:
        """Say that this rank has come to the next round, with a row of at most ROW_BYTES."""
        self.round += 1
        if row is not None:
            raw = row.view(np.uint8)
            self._rows[self.round & 1][self._rank, : raw.size] = raw
        fence()
        self._counters[self._places[self._rank]] = self.round
        for bell in self._others_bells:
            os.eventfd_write(bell, 1)

    def all_here(self) -> bool:
        """Return whether all ranks have come to this round."""
        counters, number = self._counters, self.round
        for place in self._others:
            if counters[place] < number:
                return False
        fence()
        return True

    def sleep(self, seconds: float) -> None:
        """Wait until somebody rings, at most as long (whole milliseconds)."""
        if self._poll.poll(max(1, int(1000 * seconds))):
            os.eventfd_read(self._bell)

    def rows(self, dtype: np.dtype, count: int) -> np.ndarray:
        """Return the rows that all ranks posted in this round (ranks x count)."""
        return self._rows[self.round & 1].view(dtype)[:, :count].copy()
