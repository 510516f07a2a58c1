"""Messages between the scheduler and the members of a job: one JSON object a line, over TCP."""

from __future__ import annotations

import json
import socket
from typing import Any

LONGEST = 1 << 20
# A host that has gone without a word is noticed within a minute.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 50_000))


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message).encode() + b"\n"


class LineReader:
    """Collects bytes and hands out the messages that they finish.

    Args:
        longest: how many bytes a line may have.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self._pending = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take bytes; return the messages that are whole now.

        Raises:
            ValueError: a line is too long, or no JSON object.
        """
        *lines, self._pending = (self._pending + data).split(b"\n")
        if max(map(len, (*lines, self._pending))) > self.longest:
            raise ValueError(f"a line has more than {self.longest} bytes")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line is no JSON object")
        return messages


def keep_alive(connection: socket.socket) -> None:
    """Make the system ask from time to time whether the other side is still there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
