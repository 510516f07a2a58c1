"""A process that outlives the driver for a moment: it lets stopped ranks go on when the driver is gone.

A rank that is stopped (SIGSTOP) cannot see that its driver has been killed, and on another host nobody else would tell
it; woken, it finds its socket closed and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

_active: subprocess.Popen[bytes] | None = None


@contextlib.contextmanager
def guardian() -> Iterator[None]:
    """Run the guardian for the block."""
    global _active
    _active = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.guardian"], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        assert _active.stdin is not None
        _active.stdin.close()
        _active.wait()
        _active = None


def guard(pid: int) -> None:
    """Have a process woken when this one is gone."""
    if _active is not None and _active.stdin is not None:
        _active.stdin.write(b"%d\n" % pid)
        _active.stdin.flush()


def main() -> None:
    """Read ids until the driver's end, then wake them."""
    for line in sys.stdin.buffer.readlines():
        with contextlib.suppress(OSError):
            os.kill(int(line), signal.SIGCONT)


if __name__ == "__main__":
    main()
