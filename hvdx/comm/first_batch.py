"""Noticing that all ranks bring the same bits to their first exchange: then they read the same data."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from hvdx.logs import log

_FINGERPRINT_BYTES = 1 << 20
_TEXTS = 10_000


def fingerprint(arrays: Sequence[np.ndarray]) -> int:
    """Return a number that is equal where the arrays' bits are, or 0 where they are all zero."""
    crc, seen, any_set = 0, 0, False
    for array in arrays:
        if array.dtype.hasobject:  # texts
            array = np.frombuffer(repr(array.reshape(-1)[:_TEXTS].tolist()).encode(), np.uint8)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)[: max(0, _FINGERPRINT_BYTES - seen)]
        crc, seen, any_set = zlib.crc32(raw.data, crc), seen + raw.nbytes, any_set or bool(raw.any())
    return crc + 1 if any_set else 0


def warn_if_equal(mine: int, all_ranks: np.ndarray, message: str) -> None:
    """Say `message`, once, if all ranks' fingerprints are the same and not those of zeros."""
    if mine and (all_ranks == mine).all():
        warn_once(message)


_warned: list[str] = []


def warn_once(message: str) -> None:
    """Log the warning, unless one about the ranks' data has been logged: a program need hear of it only once."""
    if not _warned:
        _warned.append(message)
        log.warning("%s", message)
