"""Waiting for all ranks at the first one's address before TensorFlow starts there, whose own wait has no limit."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Sequence

from hvdx.errors import StallError, WorldError

_HELLO = b"hvdx"
_GO = b"go"
_NO = b"no "
_PAUSE = 0.1
_LONGEST = 1 << 16
_LATER = 5.0
"""Seconds by which rank 0's limit may end after another's, who came earlier and hears from it who is missing."""


def roll_call(rank: int, addresses: Sequence[str], seconds: float) -> None:
    """Return when all ranks have called this; the addresses are free again then.

    Args:
        rank: this rank.
        addresses: host:port of every rank.
        seconds: how long to wait.

    Raises:
        StallError: a rank did not come; names it and its address.
        WorldError: this rank's port is taken.
    """
    end = time.monotonic() + seconds
    if rank == 0:
        _receive_all(addresses, end, seconds)
    else:
        _report(rank, addresses[0], end, seconds)


def _receive_all(addresses: Sequence[str], end: float, seconds: float) -> None:
    present: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(addresses[0]))
        while len(present) < len(addresses) - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                absent = [r for r in range(1, len(addresses)) if r not in present]
                who = ", ".join(f"rank {r} at {addresses[r]}" for r in absent)
                problem = f"Not all ranks came within {seconds:g} s (HVDX_START_TIMEOUT). Missing: {who}."
                _tell(present.values(), _NO + problem.encode())
                raise StallError(problem) from None
            stack.enter_context(connection)
            connection.settimeout(5)
            with contextlib.suppress(OSError, ValueError):  # a stranger
                hello = connection.recv(64)
                number = int(hello[len(_HELLO) :]) if hello.startswith(_HELLO) else 0
                if 0 < number < len(addresses):
                    present[number] = connection
        _tell(present.values(), _GO)


def _tell(connections: Iterable[socket.socket], word: bytes) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # gone since: TensorFlow will miss it
            connection.sendall(word)


def _listen(address: str) -> socket.socket:
    port = int(address.rpartition(":")[2])
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
    except OSError as error:
        server.close()
        raise WorldError(f"Rank 0 cannot use its address {address}: {error}. Choose another port.") from None
    server.listen(512)
    return server


def _report(rank: int, address: str, end: float, seconds: float) -> None:
    host, _, port = address.rpartition(":")
    reason = "nobody listens there"
    while time.monotonic() < end:
        try:
            with socket.create_connection((host, int(port)), timeout=max(0.01, end - time.monotonic())) as connection:
                connection.sendall(_HELLO + str(rank).encode())
                connection.settimeout(max(0.01, end + _LATER - time.monotonic()))
                with connection.makefile("rb") as answer:
                    word = answer.read(_LONGEST)
        except OSError as error:
            reason = str(error)
        else:
            if word == _GO:
                return
            if word.startswith(_NO):
                raise StallError(word.removeprefix(_NO).decode(errors="replace"))
            reason = "it ended the wait" if not word else "what listens there is not rank 0"
        time.sleep(_PAUSE)
    raise StallError(f"Rank 0 at {address} did not give the start within {seconds:g} s (HVDX_START_TIMEOUT): {reason}.")
