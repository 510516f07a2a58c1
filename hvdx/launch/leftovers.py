"""Shared memory that MPI leaves behind on this host when ranks end without finalising it; a small /dev/shm fills up."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# Open MPI, MPICH, Intel MPI.
_NAMES = re.compile(r"(sm_segment\.|vader_segment\.|mpich_shm_|mpich_barrier_|Intel_MPI_|shm-col-space-)")


def sweep(since: float, folder: Path = SHARED_MEMORY, patience: float = 1.0) -> list[Path]:
    """Remove MPI's files that this user's ended processes left in `folder`; return them.

    Only files made after `since` (in seconds since the epoch) which no process has open or mapped are removed, so
    those of other jobs stay. Waits up to `patience` seconds for processes that are just ending.
    """
    removed: list[Path] = []
    end = time.monotonic() + patience
    while True:
        candidates = list(_candidates(since, folder))
        used = _in_use(folder) if candidates else set()
        for path in candidates:
            if str(path) not in used:
                with contextlib.suppress(OSError):
                    path.unlink()
                    removed.append(path)
        if not any(str(path) in used for path in candidates) or time.monotonic() > end:
            return removed
        time.sleep(0.2)


def _candidates(since: float, folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                # The clock of file times ticks more coarsely than time.time().
                if _NAMES.match(path.name) and status.st_uid == os.geteuid() and status.st_ctime >= since - 0.1:
                    yield path


def _in_use(folder: Path) -> set[str]:
    """Return the files in `folder` that some process has open or mapped."""
    found: set[str] = set()
    prefix = f"{folder}/"
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        # Open files first: MPI maps a file before it closes it, so it is seen in one of the two.
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(descriptor))
        with contextlib.suppress(OSError):
            text = (process / "maps").read_text(errors="replace")
            found.update(line[line.index(prefix) :] for line in text.splitlines() if prefix in line)
    return found
