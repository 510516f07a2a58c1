"""Which epoch an iteration over a dataset is: counted, and moved forward where a training goes on from a checkpoint."""

from __future__ import annotations

import threading
import weakref

_living: weakref.WeakSet[EpochCounter] = weakref.WeakSet()


class EpochCounter:
    """Counts the iterations over one dataset; each is an epoch.

    Args:
        first: the number of the first one.
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self._lock = threading.Lock()
        _living.add(self)

    def next(self) -> int:
        """Return the number of the epoch that begins."""
        with self._lock:
            epoch, self._next = self._next, self._next + 1
        return epoch

    def skip_to(self, epoch: int) -> None:
        """Make `epoch` the next one, unless that is past."""
        with self._lock:
            self._next = max(self._next, epoch)


def skip_to(epoch: int) -> None:
    """Make `epoch` the next one of all datasets, unless they are past it.

    For whatever restores a training after `epoch` epochs, before it reads data: the samples then come in the order in
    which they would have come without the interruption.
    """
    for counter in list(_living):
        counter.skip_to(epoch)
