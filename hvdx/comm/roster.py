"""Who is missing, asked over TCP: a rank that waits asks the others in which call they are; a stopped one is silent.

The native libraries give no second channel while one of their calls hangs, so each rank answers on a port of its own,
in a thread. Nothing but the number of the newest call is told, and only to who knows the job's token.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_ANSWER = struct.Struct("<q")
TOKEN_BYTES = 16
_SECONDS = 2.0
_ASK_AT_ONCE = 32


class Roster:
    """Listens at once; asks after `join`."""

    def __init__(self) -> None:
        self.sequence = 0
        """The newest call this rank has come to."""
        self._token = b""
        self._peers: list[tuple[str, int]] = []
        self._rank = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind(("", 0))
        self._socket.listen(128)
        self._thread = threading.Thread(target=self._answer, name="hvdx-roster", daemon=True)

    @property
    def port(self) -> int:
        """The port on which this rank answers."""
        return int(self._socket.getsockname()[1])

    def join(self, rank: int, peers: Sequence[tuple[str, int]], token: bytes) -> None:
        """Start to answer.

        Args:
            rank: this rank.
            peers: host and port of every rank.
            token: what who asks must know; the same on all ranks.
        """
        self._rank, self._peers, self._token = rank, list(peers), token
        self._thread.start()

    def missing(self, sequence: int) -> list[int]:
        """Return the ranks that have not come to call `sequence`, or do not answer; takes up to a few seconds.

        Empty where nobody answers: then it is this rank that cannot reach the others, or a firewall is in between.
        """
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        if not others:
            return []
        with ThreadPoolExecutor(min(_ASK_AT_ONCE, len(others))) as pool:
            answers = dict(zip(others, pool.map(self._ask, others), strict=True))
        if len(others) > 1 and all(answer is None for answer in answers.values()):
            return []
        return [rank for rank, answer in answers.items() if answer is None or answer < sequence]

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _ask(self, rank: int) -> int | None:
        try:
            with socket.create_connection(self._peers[rank], timeout=_SECONDS) as connection:
                connection.settimeout(_SECONDS)
                connection.sendall(self._token)
                return int(_ANSWER.unpack(_receive(connection, _ANSWER.size))[0])
        except OSError:
            return None

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_SECONDS)
                if hmac.compare_digest(_receive(connection, TOKEN_BYTES), self._token):
                    connection.sendall(_ANSWER.pack(self.sequence))


def _receive(connection: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionResetError
        parts += part
    return parts
