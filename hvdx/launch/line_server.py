"""A TCP server of JSON lines in one thread: accepts, reads whole messages, sends without ever waiting for a reader."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from hvdx.launch.json_lines import LineReader, encode, keep_alive

_INTRODUCTION_SECONDS = 10.0
_LONGEST_INTRODUCTION = 1 << 16
_LAST_WORDS_SECONDS = 2.0


def listen(port: int = 0, everywhere: bool = False) -> socket.socket:
    """Return a listening socket on the loopback or on all interfaces; OSError where the port is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("" if everywhere else "127.0.0.1", port))
        listener.listen(512)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class Connection:
    """One connection; `known` is for its owner to set once it has introduced itself, else it is closed soon."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.reader = LineReader(_LONGEST_INTRODUCTION)
        self.until = time.monotonic() + _INTRODUCTION_SECONDS
        self.known: Any = None
        self.finished = False
        self.outgoing = b""


class LineServer:
    """Serves connections on a listening socket whenever `poll` is called.

    Args:
        listener: from `listen`; closed with the server.
        on_message: called with each message of a connection that is not finished.
        on_lost: called when the other side has closed a connection, which is gone then.
    """

    def __init__(
        self,
        listener: socket.socket,
        on_message: Callable[[Connection, dict[str, Any]], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.port = int(listener.getsockname()[1])
        self.connections: list[Connection] = []
        self._listener = listener
        self._on_message, self._on_lost = on_message, on_lost
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for source in (self._wake, listener):
            source.setblocking(False)
            self._selector.register(source, selectors.EVENT_READ, None)
        self._waker.setblocking(False)

    def poll(self, seconds: float) -> None:
        """Wait for something to serve, at most some seconds, and serve it."""
        for key, events in self._selector.select(seconds):
            if key.data is not None:
                self._serve(key.data, events)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                with contextlib.suppress(OSError):
                    self._wake.recv(4096)
        now = time.monotonic()
        for connection in list(self.connections):
            if (connection.known is None or connection.finished) and now > connection.until:
                self.drop(connection)

    def wake(self) -> None:
        """Make `poll` return; from any thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    def send(self, connection: Connection, message: dict[str, Any]) -> None:
        """Send a message as soon as the other side takes it."""
        connection.outgoing += encode(message)
        self._flush(connection)

    def finish(self, connection: Connection, message: dict[str, Any] | None = None) -> None:
        """Close a connection once all is sent, at last a message."""
        connection.finished = True
        connection.until = time.monotonic() + _LAST_WORDS_SECONDS
        connection.outgoing += b"" if message is None else encode(message)
        self._flush(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection at once."""
        if connection in self.connections:
            self.connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def close(self) -> None:
        """Give what is still to be sent a moment, and close everything."""
        end = time.monotonic() + _LAST_WORDS_SECONDS
        self._selector.unregister(self._listener)
        self._listener.close()
        while any(connection.outgoing for connection in self.connections) and time.monotonic() < end:
            self.poll(0.1)
        for connection in list(self.connections):
            self.drop(connection)
        for closable in (self._selector, self._wake, self._waker):
            closable.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = self._listener.accept()
            accepted.setblocking(False)
            keep_alive(accepted)
            connection = Connection(accepted)
            self.connections.append(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(connection)
        if not events & selectors.EVENT_READ or connection not in self.connections:
            return
        try:
            data = connection.socket.recv(65536)
            messages = connection.reader.feed(data) if data else []
        except BlockingIOError:
            return
        except (OSError, ValueError):  # gone, or no member of ours
            data, messages = b"", []
        for message in messages:
            if connection in self.connections and not connection.finished:
                self._on_message(connection, message)
        if not data and connection in self.connections:
            self.drop(connection)
            self._on_lost(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            while connection.outgoing:
                connection.outgoing = connection.outgoing[connection.socket.send(connection.outgoing) :]
        except BlockingIOError:
            pass
        except OSError:
            connection.outgoing = b""  # that it has gone shows when it is read
        if connection.finished and not connection.outgoing:
            self.drop(connection)
        elif connection in self.connections:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outgoing else 0)
            self._selector.modify(connection.socket, events, connection)
