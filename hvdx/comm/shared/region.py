"""Memory behind a file without a name, which several processes of a host map.

A memfd has no place in any directory: when the last process that has it ends, however it ends, the memory is gone. It
does not count against the size of /dev/shm either, which containers often keep at 64 MB.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path

import numpy as np

_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def create(name: str) -> int:
    """Return the descriptor of a new, empty file without a name.

    Args:
        name: what lists of open files show.

    Raises:
        OSError: the system has no such files or does not allow them.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    return os.memfd_create(name, os.MFD_CLOEXEC)


def available() -> int:
    """Return how many bytes of memory this process's machine or container still has."""
    found = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(1024 * int(line.split()[1]))
    for limit, used in _LIMITS:
        numbers = _read(limit).strip(), _read(used).strip()
        if all(text.isdigit() for text in numbers):
            found.append(int(numbers[0]) - int(numbers[1]) + _reclaimable(Path(limit).parent))
    return max(0, min(found, default=1 << 62))


def _reclaimable(group: Path) -> int:
    """Return the bytes of a container's memory that only keep files at hand; shared memory is no such file."""
    lines = (line.split() for line in _read(str(group / "memory.stat")).splitlines())
    numbers = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    return max(0, numbers.get("file", numbers.get("cache", 0)) - numbers.get("shmem", 0))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


class Region:
    """One such file as this process sees it. It grows and never shrinks.

    Args:
        descriptor: of a memfd; the region owns it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._writable = np.empty(0, np.uint8)
        self._readable = np.empty(0, np.uint8)
        self._rest = self._writable

    def reserve(self, nbytes: int) -> None:
        """Make sure that `nbytes` of memory stand behind the file; nothing is done where they do.

        Raises:
            OSError: there is not so much memory, or a limit of the process or the system forbids it. Without this,
                the first write would end the process by a signal.
        """
        have = os.fstat(self._descriptor).st_size
        if nbytes <= have:
            return
        if nbytes - have > available():
            raise OSError(errno.ENOMEM, f"{available():,} bytes of memory are left")
        os.posix_fallocate(self._descriptor, 0, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    @property
    def held(self) -> int:
        """Bytes of memory behind the file."""
        return os.fstat(self._descriptor).st_size

    def writable(self, nbytes: int) -> np.ndarray:
        """Return at least the first `nbytes`, reserved before, as uint8; the same array until it has to be longer."""
        if self._writable.nbytes < nbytes:
            self._writable = self._map(mmap.PROT_READ | mmap.PROT_WRITE)
        return self._writable

    def from_byte(self, start: int, nbytes: int) -> np.ndarray:
        """Return at least `nbytes` behind the first `start`, which must always be the same number; the same array until
        it has to be longer."""
        memory = self.writable(start + nbytes)
        if self._rest.base is not memory:
            self._rest = memory[start:]
        return self._rest

    @property
    def is_idle(self) -> bool:
        """Whether nobody in this process looks at what `readable` has returned."""
        return sys.getrefcount(self._readable) == 2  # this attribute and the argument

    def readable(self, nbytes: int) -> np.ndarray:
        """Return the same memory as an array that nobody can write to: a mistake ends in an error, not in numbers."""
        if self._readable.nbytes < nbytes:
            self._readable = self._map(mmap.PROT_READ)
        return self._readable

    def _map(self, protection: int) -> np.ndarray:
        size = os.fstat(self._descriptor).st_size
        return np.frombuffer(mmap.mmap(self._descriptor, size, mmap.MAP_SHARED, protection), np.uint8)

    def close(self) -> None:
        """Give up the file; memory stays as long as somebody looks at it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._writable = np.empty(0, np.uint8)
        self._readable = np.empty(0, np.uint8)
        self._rest = self._writable
