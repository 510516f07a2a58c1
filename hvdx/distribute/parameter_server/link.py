"""A worker's connections to its servers: one thread sends, receives, and shows that this worker is alive."""

from __future__ import annotations

import itertools
import queue
import socket as sockets
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdx import environment
from hvdx.distribute.parameter_server.protocol import Message, error_of, pack, socket, unpack, zmq
from hvdx.errors import StallError

_BEAT = 1.0
_PROBE = 2.0
"""Seconds of silence after which a server is asked about a request, and whether it is there at all."""
_REFUSALS = 3


class Pending:
    """A request on its way; `done` is set when its answer has come."""

    def __init__(self, server: int, number: int, what: str, frames: list[Any]) -> None:
        self.server, self.number, self.what, self.frames = server, number, what, frames
        self.done = threading.Event()
        self.reply: Message | None = None
        self.waits_for = ""
        self.lost = False
        self.refused = 0


class Link:
    """Connections of one worker to all servers.

    Args:
        addresses: host:port of every server.
        worker: this worker's number.
        token: what each message of the job carries.
        group: the name of the model.
        departed: returns the servers that are known to be gone, with the reason.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        worker: int,
        token: str,
        group: str,
        departed: Callable[[], Mapping[int, str]] | None = None,
    ) -> None:
        self.addresses = list(addresses)
        self.session = uuid.uuid4().hex
        self._common = {"token": token, "worker": worker, "group": group, "session": self.session}
        self._departed = departed or dict
        self._numbers = itertools.count(1)
        self._outgoing: queue.SimpleQueue[tuple[int, list[Any]] | None] = queue.SimpleQueue()
        self._pending: dict[int, Pending] = {}
        self._context = zmq.Context()
        self._wake = self._context.socket(zmq.PAIR)
        self._wake_lock = threading.Lock()
        self._wake.bind("inproc://wake")
        self._thread = threading.Thread(target=self._run, name=f"hvdx parameter client {group}", daemon=True)
        self._thread.start()

    def request(self, server: int, operation: str, header: dict[str, Any], arrays: Sequence[Any] = ()) -> Pending:
        """Send a request; `wait` returns its answer."""
        number = next(self._numbers)
        frames = pack({**self._common, **header, "op": operation, "id": number}, arrays)
        pending = self._pending[number] = Pending(server, number, operation, frames)
        self._send(server, frames)
        return pending

    def wait(self, requests: Sequence[Pending], limit: float | None = None) -> list[Message]:
        """Return the answers to requests, in their order.

        Raises:
            StallError: a server is gone or silent, or a worker that it waits for; names who.
            HvdxError: what a server answered with.
        """
        seconds = environment.TIMEOUT.read() if limit is None else limit
        end = time.monotonic() + seconds
        try:
            for pending in requests:
                self._wait_for_one(pending, end, seconds)
            replies = [pending.reply for pending in requests]
        finally:
            for pending in requests:
                self._pending.pop(pending.number, None)
        errors = [error for reply in replies if reply is not None and (error := error_of(reply.header))]
        if errors:
            raise errors[0]
        return [reply for reply in replies if reply is not None]

    def close(self) -> None:
        """End the thread and the connections; what has been sent still leaves."""
        self._outgoing.put(None)
        self._ring()
        self._thread.join(5.0)
        self._wake.close(linger=0)
        self._context.destroy(linger=2000)

    def _wait_for_one(self, pending: Pending, end: float, seconds: float) -> None:
        asked = time.monotonic()
        while not pending.done.wait(min(0.5, max(0.0, end - time.monotonic()))):
            now = time.monotonic()
            gone = self._departed().get(pending.server)
            if gone is not None:
                raise StallError(f"{self._name(pending.server)} is gone: {gone}.")
            if now > end:
                waits = f" It waits for {pending.waits_for}." if pending.waits_for else ""
                raise StallError(
                    f"{self._name(pending.server)} has not answered ({pending.what}) within {seconds:g} s "
                    f"(HVDX_TIMEOUT).{waits}"
                )
            if pending.lost:  # it came to a server that the connection was cut to
                pending.lost = False
                self._send(pending.server, pending.frames)
            if now - asked > _PROBE:
                asked = now
                self._ask(pending)

    def _ask(self, pending: Pending) -> None:
        """Ask about a request, and look whether anybody listens there."""
        host, _, port = self.addresses[pending.server].rpartition(":")
        try:
            sockets.create_connection((host, int(port)), timeout=1.0).close()
            pending.refused = 0
        except ConnectionRefusedError:
            pending.refused += 1
            if pending.refused >= _REFUSALS:
                raise StallError(
                    f"{self._name(pending.server)} is gone: nobody listens there any more. Look at its output for the "
                    "reason, and start the job again from the last saved state."
                ) from None
        except OSError:
            pass  # slow or unreachable for now: the limit on the wait decides
        number = next(self._numbers)
        frames = pack({**self._common, "op": "ask", "id": number, "about": pending.number})
        question = self._pending[number] = Pending(pending.server, number, "ask", frames)
        question.waits_for = str(pending.number)
        self._send(pending.server, frames)

    def _name(self, server: int) -> str:
        return f"Parameter server {server} at {self.addresses[server]}"

    def _send(self, server: int, frames: list[Any]) -> None:
        self._outgoing.put((server, frames))
        self._ring()

    def _ring(self) -> None:
        with self._wake_lock:
            self._wake.send(b"")

    def _run(self) -> None:
        woken = self._context.socket(zmq.PAIR)
        woken.connect("inproc://wake")
        poller = zmq.Poller()
        poller.register(woken, zmq.POLLIN)
        dealers = []
        for address in self.addresses:
            dealer = socket(self._context, zmq.DEALER)
            dealer.connect(f"tcp://{address}")
            poller.register(dealer, zmq.POLLIN)
            dealers.append(dealer)
        beat = pack({**self._common, "op": "beat", "id": 0})
        last = 0.0
        running = True
        while running:
            for ready, _ in poller.poll(int(1000 * _BEAT / 2)):
                if ready is woken:
                    woken.recv()
                    running = self._send_next(dealers) and running
                else:
                    self._receive(ready)
            if time.monotonic() - last > _BEAT:
                last = time.monotonic()
                for dealer in dealers:
                    dealer.send_multipart(beat)
        woken.close(linger=0)
        for dealer in dealers:
            dealer.close(linger=2000)

    def _send_next(self, dealers: Sequence[Any]) -> bool:
        item = self._outgoing.get()
        if item is None:
            return False
        server, frames = item
        dealers[server].send_multipart(frames, copy=False)
        return True

    def _receive(self, dealer: Any) -> None:
        message = unpack(dealer.recv_multipart(copy=False))
        pending = self._pending.get(int(message.header["id"]))
        if pending is None:
            return
        if pending.what == "ask":
            del self._pending[pending.number]
            about = self._pending.get(int(pending.waits_for))
            if about is not None and not about.done.is_set():
                about.waits_for = message.header["waits_for"]
                about.lost = not message.header["known"]
            return
        pending.reply = message
        pending.done.set()
