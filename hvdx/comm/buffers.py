"""Fusion buffers that are used again as soon as nobody looks at them any more."""

from __future__ import annotations

import sys
import threading

import numpy as np

from hvdx.fusion import ALIGNMENT

_PAGE = 4096


class BufferPool:
    """Aligned byte buffers, lent out and taken back by counting references.

    TensorFlow keeps a numpy array that a numpy_function returned and uses its memory in place. A buffer may be
    written again only when all views into it are gone; since a view holds a reference to the array that owns the
    memory, the count of that array tells. No caller has to give anything back.
    """

    def __init__(self) -> None:
        self._owners: list[np.ndarray] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers this pool holds."""
        return sum(owner.nbytes for owner in self._owners)

    def take(self, nbytes: int) -> np.ndarray:
        """Return an uninitialised uint8 buffer of `nbytes`, aligned to 64 bytes, that nobody else sees."""
        need = nbytes + ALIGNMENT
        with self._lock:
            best = None
            for index in range(len(self._owners)):
                # 2: the list's own reference and the argument of getrefcount
                if sys.getrefcount(self._owners[index]) != 2:
                    continue
                size = self._owners[index].nbytes
                if need <= size <= max(2 * need, _PAGE) and (best is None or size < self._owners[best].nbytes):
                    best = index
            if best is None:
                self._drop_idle(need)
                self._owners.append(np.empty(max(need, _PAGE), np.uint8))
                best = len(self._owners) - 1
            owner = self._owners[best]
        start = -owner.ctypes.data % ALIGNMENT
        return owner[start:][:nbytes]  # in two steps: numpy lets an empty slice begin at the owner's first byte

    def _drop_idle(self, need: int) -> None:
        """Free idle buffers before a new one is made, so that changing shapes do not pile up memory."""
        self._owners = [owner for owner in self._owners if sys.getrefcount(owner) != 3 or owner.nbytes < need // 4]
