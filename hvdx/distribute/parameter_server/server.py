"""A server process: it answers the workers of a job until all of them have finished."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdx import environment
from hvdx.distribute.parameter_server.clocks import named
from hvdx.distribute.parameter_server.group import Group
from hvdx.distribute.parameter_server.protocol import admits, pack, socket, unpack, zmq
from hvdx.distribute.parameter_server.request import Request
from hvdx.errors import CollectiveError, ConfigurationError, StallError
from hvdx.logs import log

SILENCE = 60.0
"""Seconds after which a worker that sends no sign of life counts as gone; its process sends one every second."""

_TICK = 0.25


class Server:
    """One of a job's parameter servers.

    Args:
        index: its number.
        workers: how many workers the job has.
        token: what each message of the job carries.
        host: where it listens; the workers must reach it there.
        port: the port; 0 takes a free one.
        silence: seconds after which a worker that sends no sign of life counts as gone.
        departed: returns the workers that are known to be gone, with the reason; asked all the time.

    Raises:
        ConfigurationError: it cannot listen there.
    """

    def __init__(
        self,
        index: int,
        workers: int,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        silence: float = SILENCE,
        departed: Callable[[], Mapping[int, str]] | None = None,
    ) -> None:
        self.index, self._workers, self._token = index, workers, token
        self._silence, self.departed = silence, departed or dict
        self._groups: dict[str, Group] = {}
        self._pending: dict[tuple[str, int], Request] = {}
        self._seen: dict[int, float] = {}
        self._ended: dict[int, str] = {}
        self._context = zmq.Context()
        self._socket = socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigurationError(
                f"Parameter server {index} cannot listen at {host}:{port}: {error}. Give another port, or end what "
                "uses it."
            ) from None
        bound = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self.address = f"{host}:{bound.rstrip(chr(0)).rpartition(':')[2]}"

    def serve(self) -> list[dict[str, Any]]:
        """Answer the workers until all of them have finished; return each group's counters.

        Raises:
            StallError: no worker came within HVDX_START_TIMEOUT, or all that had not finished are gone.
        """
        start = time.monotonic()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        try:
            while len(self._ended) < self._workers:
                if poller.poll(int(1000 * _TICK)):
                    self._receive()
                else:  # whoever seems silent may have written while this server computed: first all is read
                    self._look_for_the_gone(start)
        finally:
            stats = [group.stats() for group in self._groups.values()]
            self._context.destroy(linger=2000)
        lost = {worker: why for worker, why in self._ended.items() if why != "finished"}
        if len(lost) == self._workers:
            raise StallError(f"Parameter server {self.index} ends: all workers are gone ({_words(lost)}).")
        if lost:
            log.warning("parameter server %d ends; gone before it had finished: %s", self.index, _words(lost))
        return stats

    def _receive(self) -> None:
        identity, *frames = self._socket.recv_multipart(copy=False)
        try:
            message = unpack(frames)
            header = message.header
            if not admits(header, self._token):
                raise ValueError("it is not of this job")
            worker = int(header["worker"])
            if not 0 <= worker < self._workers:
                raise ValueError(f"there is no worker {worker}")
            request = Request(header, message.arrays, self._sender(identity.bytes))
            self._seen[worker] = time.monotonic()
            self._dispatch(request)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            log.warning("parameter server %d leaves a message unanswered: %r", self.index, error)

    def _dispatch(self, request: Request) -> None:
        header = request.header
        operation, key = header["op"], (header["session"], header["id"])
        if operation == "beat":
            return
        if operation == "ask":
            self._tell(request)
            return
        if operation == "leave":
            self._leave(request)
            return
        self._pending = {known: waiting for known, waiting in self._pending.items() if not waiting.answered}
        self._pending[key] = request
        if operation == "register":
            self._ended.pop(request.worker, None)
        group = self._groups.setdefault(header["group"], Group(header["group"], self.index, self._workers))
        try:
            group.handle(request)
        except Exception as error:  # of TensorFlow, of a user's class: whoever waits must hear of it
            log.exception("parameter server %d failed", self.index)
            wrapped = CollectiveError(f"Parameter server {self.index} failed: {type(error).__name__}: {error}")
            group.fail(wrapped)
            request.fail(wrapped)

    def _tell(self, request: Request) -> None:
        """Say whether a request is known, and for what it waits."""
        known = self._pending.get((request.header["session"], request.header["about"]))
        waits = known is not None and not known.answered
        request.answer({"known": waits, "waits_for": known.waits_for if known is not None and waits else ""})

    def _leave(self, request: Request) -> None:
        for group in self._groups.values():
            if request.header["done"] or group.name == request.header["group"]:
                group.leave(request.worker, "finished")
        if request.header["done"]:
            self._ended[request.worker] = "finished"
        request.answer()

    def _look_for_the_gone(self, start: float) -> None:
        now = time.monotonic()
        limit = environment.START_TIMEOUT.read()
        if not self._seen and now - start > limit:
            raise StallError(
                f"Parameter server {self.index} at {self.address} waited {limit:g} s (HVDX_START_TIMEOUT), and no "
                "worker came."
            )
        gone = dict(self.departed())
        for worker in range(self._workers):
            since = now - self._seen.get(worker, start + max(0.0, limit - self._silence))
            if since > self._silence:
                gone.setdefault(worker, f"no sign of life for {since:.0f} s" if worker in self._seen else "never came")
        for worker, why in gone.items():
            if worker not in self._ended:
                log.warning("parameter server %d: worker %d is gone: %s", self.index, worker, why)
                self._ended[worker] = why
                for group in self._groups.values():
                    group.leave(worker, why)

    def _sender(self, identity: bytes) -> Callable[[dict[str, Any], Sequence[Any]], None]:
        def send(header: dict[str, Any], arrays: Sequence[Any]) -> None:
            with contextlib.suppress(zmq.ZMQError):  # who is not there any more gets no answer
                self._socket.send_multipart([identity, *pack(header, arrays)], copy=False)

        return send


def serve(index: int, workers: int, token: str, **options: Any) -> list[dict[str, Any]]:
    """Be a server until the workers have finished; see `Server`."""
    return Server(index, workers, token, **options).serve()


def _words(lost: dict[int, str]) -> str:
    return ", ".join(f"{named([worker])}: {why}" for worker, why in sorted(lost.items()))
