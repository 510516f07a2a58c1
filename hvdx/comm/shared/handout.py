"""Handing open files from one process to the others of its host, through a socket without a name in any directory."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Sequence

_SECONDS = 20.0
_AT_A_TIME = 200
"""Descriptors in one message; Linux allows 253."""
_PEER = struct.Struct("iII")


def new_address() -> str:
    """Return an address nobody can guess; the leading zero keeps it out of the file system."""
    return f"\0hvdx-{secrets.token_hex(16)}"


class Giver:
    """Listens for the others.

    Args:
        address: as `new_address` makes it.
        takers: how many will come.

    Raises:
        OSError: this system has no such sockets.
    """

    def __init__(self, address: str, takers: int) -> None:
        self._takers = takers
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address)
        self._socket.listen(takers + 1)
        self._socket.settimeout(_SECONDS)

    def give(self, descriptors: Sequence[int]) -> None:
        """Hand the files to all that have connected, which must be this user's processes.

        Raises:
            OSError: somebody did not come, or somebody else came.
        """
        for _ in range(self._takers):
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(_SECONDS)
                options = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                if _PEER.unpack(options)[1] != os.getuid():
                    raise PermissionError("a process of another user asked for the shared memory")
                for start in range(0, len(descriptors), _AT_A_TIME):
                    socket.send_fds(connection, [b"+"], list(descriptors[start : start + _AT_A_TIME]))

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


class Taker:
    """Connects to the giver.

    Raises:
        OSError: nobody listens at the address.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_SECONDS)
        try:
            self._socket.connect(address)
        except OSError:
            self._socket.close()
            raise

    def take(self, count: int) -> list[int]:
        """Return as many descriptors.

        Raises:
            OSError: the giver gave up.
        """
        found: list[int] = []
        while len(found) < count:
            message, descriptors, _, _ = socket.recv_fds(self._socket, 1, _AT_A_TIME)
            if not message:
                for descriptor in found:
                    os.close(descriptor)
                raise ConnectionError("the process that makes the shared memory gave up")
            found += descriptors
        return found

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
