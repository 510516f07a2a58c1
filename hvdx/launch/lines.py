"""Whole lines out of a byte stream, each with a tag in front; used by the launcher and beside every rank.

Only the standard library: `rank.py` runs this file by its path, without the package.
"""

from __future__ import annotations

import os
import select


class LineBuffer:
    """Collects bytes and hands out text that ends with a line; a carriage return (progress bars) ends one too.

    Args:
        tag: what stands in front of every line.
    """

    def __init__(self, tag: bytes = b"") -> None:
        self._tag = tag
        self._pending = b""
        self._inside_line = False

    @property
    def waiting(self) -> bool:
        """Whether an unfinished line is held back."""
        return bool(self._pending)

    def feed(self, data: bytes) -> bytes:
        """Take bytes; return the lines that they finish."""
        self._pending += data
        cut = self._pending.rfind(b"\n") + 1
        # A carriage return at the very end may be the first half of "\r\n": wait for what follows.
        cut = max(cut, self._pending.rfind(b"\r", 0, len(self._pending) - 1) + 1)
        finished, self._pending = self._pending[:cut], self._pending[cut:]
        return self._tagged(finished)

    def flush(self, end_line: bool = False) -> bytes:
        """Return the unfinished line as it is; with `end_line` finish it, as for a stream that has ended."""
        rest, self._pending = self._pending, b""
        text = self._tagged(rest)
        if end_line and self._inside_line:
            text += b"\n"
            self._inside_line = False
        return text

    def _tagged(self, text: bytes) -> bytes:
        if not text:
            return b""
        parts = []
        for line in _split_lines(text):
            parts.append(line if self._inside_line else self._tag + line)
            self._inside_line = not line.endswith((b"\n", b"\r"))
        return b"".join(parts)


def _split_lines(text: bytes) -> list[bytes]:
    # bytes.splitlines cuts at "\n", "\r" and "\r\n" only (str.splitlines would cut at form feeds as well).
    return text.splitlines(keepends=True)


def atomic_pieces(data: bytes, limit: int = select.PIPE_BUF) -> list[bytes]:
    """Cut text into pieces of whole lines that a pipe takes in one go; a longer line is a piece of its own."""
    pieces: list[bytes] = []
    for line in _split_lines(data):
        if pieces and len(pieces[-1]) + len(line) <= limit:
            pieces[-1] += line
        else:
            pieces.append(line)
    return pieces


def write_all(target: int, data: bytes, patience: float = 10.0) -> bool:
    """Write every byte to a file descriptor; False when nobody reads it any more."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            if not select.select([], [target], [], patience)[1]:
                return False
        except OSError:
            return False
    return True
