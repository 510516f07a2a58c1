"""Where the members of a job with servers meet: each tells the scheduler its contact, and learns those of all."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdx import environment
from hvdx.comm.addresses import LOOPBACK, Contact, reachable
from hvdx.distribute.cluster import Cluster, Role
from hvdx.errors import ConfigurationError, HvdxError, StallError, WorldError
from hvdx.launch import scheduler
from hvdx.launch.json_lines import LineReader, encode, keep_alive
from hvdx.launch.line_server import listen

_CONNECT_SECONDS = 2.0
_WELCOME_SECONDS = 5.0
_AGAIN_SECONDS = 0.1
# The scheduler counts its limit from the first member's coming, and then has to say so.
_MARGIN_SECONDS = 10.0
_FAREWELL_SECONDS = 5.0
_REFUSED = "this member is refused there"
_SCHEDULER_GONE = "its connection closed before this member had left"


@dataclass(frozen=True)
class Departure:
    """A member that has left.

    Args:
        role: what it was; the scheduler itself counts where its connection is lost.
        index: its number among those of its role.
        reason: why, in words: its own ("done"), or such as "was ended by signal 9 (SIGKILL)".
        orderly: whether it said goodbye, or ended with code 0.
    """

    role: Role
    index: int
    reason: str
    orderly: bool

    def __str__(self) -> str:
        return f"{self.role.value} {self.index}: {self.reason}"


class Members:
    """The members of the job, after all have met; made by `meet`.

    Args:
        link: the connection to the scheduler, which stays open: its end is how the others learn of a death.
        role, index: this member; the scheduler has given a number to a server that came without.
        contacts: what each told of itself, the workers' and then the servers'.
        workers: how many of them are workers'.
        on_departure: called in a thread of its own with each member that leaves.
        own_scheduler: where this process is the scheduler as well.
    """

    def __init__(
        self,
        link: _Link,
        role: Role,
        index: int,
        contacts: list[Contact],
        workers: int,
        on_departure: Callable[[Departure], None] | None,
        own_scheduler: scheduler.Scheduler | None,
    ) -> None:
        self.role = role
        self.index = index
        hosts = reachable(contacts)
        addresses = [f"{h}:{c.ports[0]}" if c.ports else "" for h, c in zip(hosts, contacts, strict=True)]
        self.workers: tuple[str, ...] = tuple(addresses[:workers])
        """host:port of every worker, reachable from everywhere in the job; "" for one that told no port."""
        self.servers: tuple[str, ...] = tuple(addresses[workers:])
        """host:port of every server: the first port of its contact."""
        self.contacts = {Role.WORKER: tuple(contacts[:workers]), Role.SERVER: tuple(contacts[workers:])}
        """What each member told of itself."""
        self._link = link
        self._on_departure = on_departure
        self._own_scheduler = own_scheduler
        self._departures: dict[tuple[Role, int], Departure] = {}
        self._changed = threading.Condition()
        self._leaving = False
        self._thread = threading.Thread(target=self._listen, name="hvdx-members", daemon=True)
        self._thread.start()

    def departures(self) -> tuple[Departure, ...]:
        """Return who has left up to now, in the order of leaving."""
        with self._changed:
            return tuple(self._departures.values())

    def wait_for_departures(self, known: int, seconds: float) -> tuple[Departure, ...]:
        """Return who has left as soon as they are more than `known`, or after some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._departures) > known, seconds)
            return tuple(self._departures.values())

    def goodbye(self, reason: str = "done") -> None:
        """Leave in good order, when this member needs the others no more; a second call does nothing.

        Where this process is the scheduler too, it stays until all have left, up to HVDX_SHUTDOWN_TIMEOUT seconds.
        """
        with self._changed:
            if self._leaving:
                return
            self._leaving = True
        with contextlib.suppress(OSError):
            self._link.send({"goodbye": reason})
        if threading.current_thread() is not self._thread:
            self._thread.join(_FAREWELL_SECONDS)
        self._link.close()
        if self._own_scheduler is not None:
            self._own_scheduler.join(environment.SHUTDOWN_TIMEOUT.read())

    def _listen(self) -> None:
        try:
            while True:
                left = self._link.receive(None).get("left")
                if isinstance(left, dict):
                    self._note(Departure(Role(left["role"]), left["index"], left["reason"], left["orderly"]))
        except (OSError, ValueError, KeyError):
            with self._changed:
                expected = self._leaving
            if not expected:
                self._note(Departure(Role.SCHEDULER, 0, _SCHEDULER_GONE, False))

    def _note(self, departure: Departure) -> None:
        with self._changed:
            fresh = (departure.role, departure.index) not in self._departures
            self._departures[departure.role, departure.index] = departure
            self._changed.notify_all()
        if fresh and self._on_departure is not None:
            self._on_departure(departure)


def meet(cluster: Cluster, contact: Contact, on_departure: Callable[[Departure], None] | None = None) -> Members:
    """Tell the scheduler that this member is there, wait for all others, and return them.

    Args:
        cluster: from `resolve`, with servers.
        contact: this member's, with the ports on which it listens already.
        on_departure: called with each member that leaves; it must return soon.

    Raises:
        ConfigurationError: the job has no servers, or this process is the scheduler.
        StallError: a member, or the scheduler, did not come within HVDX_START_TIMEOUT; names it.
        WorldError: the members contradict each other, one left before all had met, or the scheduler's port is taken.
    """
    if not cluster.root or cluster.role is Role.SCHEDULER:
        raise ConfigurationError(
            f"Only the workers and servers of a job with servers meet; this process is {cluster.role.value} "
            f"{cluster.index} of {cluster.workers} worker(s) and {cluster.servers} server(s), by {cluster.source}."
        )
    limit = environment.START_TIMEOUT.read()
    own = None
    candidates = cluster.root
    if not cluster.scheduler_apart and cluster.role is Role.SERVER and cluster.index == 0:
        own = _scheduler(cluster, impatient=False)
        own.start()
        candidates = (f"{LOOPBACK}:{own.port}",)
    hello = {
        "token": cluster.token, "role": cluster.role.value, "index": cluster.index, "workers": cluster.workers,
        "servers": cluster.servers, "contact": [contact.host, contact.interfaces, contact.ports],
    }  # fmt: skip
    link = _reach(candidates, {"hello": hello}, limit, cluster)
    try:
        answer = link.receive(time.monotonic() + limit + _MARGIN_SECONDS)
        if "members" in answer:
            contacts = [_contact(raw) for role in (Role.WORKER, Role.SERVER) for raw in answer["members"][role.value]]
            return Members(link, cluster.role, answer["index"], contacts, cluster.workers, on_departure, own)
        problem: HvdxError = _refusal(str(answer.get("refused")), cluster)
    except TimeoutError:
        problem = StallError(
            f"The scheduler at {', '.join(candidates)} has not said within {limit + _MARGIN_SECONDS:g} s that all "
            "members are there (HVDX_START_TIMEOUT)."
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = WorldError(f"The scheduler at {', '.join(candidates)} was lost before all had met: {error}.")
    link.close()
    raise problem


def run_scheduler(cluster: Cluster) -> tuple[Departure, ...]:
    """Be the scheduler, as with DMLC_ROLE=scheduler, until all members have left; return who left and why.

    Raises:
        StallError: a member did not come within HVDX_START_TIMEOUT; names it.
        WorldError: the members contradict each other, one left before all had met, or the port is taken.
    """
    if cluster.role is not Role.SCHEDULER:
        raise ConfigurationError(f"This process is {cluster.role.value} {cluster.index}, not the scheduler.")
    own = _scheduler(cluster, impatient=True)
    left = own.run()
    if own.failure is not None:
        raise _refusal(own.failure, cluster)
    return tuple(Departure(Role(one.role), one.index, one.reason, one.orderly) for one in left)


def _scheduler(cluster: Cluster, impatient: bool) -> scheduler.Scheduler:
    host, _, port = cluster.root[0].rpartition(":")
    try:
        listener = listen(int(port), everywhere=host not in {LOOPBACK, "localhost"})
    except OSError as error:
        raise WorldError(
            f"The scheduler cannot listen on port {port} of {socket.gethostname()}, as {cluster.source} asks "
            f"({cluster.root[0]}): {error.strerror}. End what uses the port, or choose another one."
        ) from None
    job = scheduler.Job(cluster.workers, cluster.servers, cluster.token, environment.START_TIMEOUT.read())
    return scheduler.Scheduler(listener, job, impatient=impatient)


def _refusal(sentence: str, cluster: Cluster) -> WorldError | StallError:
    kind = StallError if "did not come within" in sentence else WorldError
    return kind(f"The members of the job ({cluster.source}) could not meet: {sentence}.")


class _Link:
    """A connection to the scheduler on which whole messages are sent and received."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = LineReader()
        self._waiting: list[dict[str, Any]] = []
        keep_alive(connection)
        # A forked child (of a data loader, say) would hold the connection open after this process has died.
        os.register_at_fork(after_in_child=functools.partial(_close, weakref.ref(connection)))

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(encode(message))

    def receive(self, until: float | None) -> dict[str, Any]:
        """Return the next message, waiting until a time of the monotonic clock; None waits for ever."""
        while not self._waiting:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError("no answer")
            self._socket.settimeout(None if until is None else max(0.001, until - time.monotonic()))
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._waiting = self._reader.feed(data)
        return self._waiting.pop(0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _close(connection: weakref.ref[socket.socket]) -> None:
    if (alive := connection()) is not None:
        alive.close()


def _reach(candidates: tuple[str, ...], hello: dict[str, Any], limit: float, cluster: Cluster) -> _Link:
    """Return the link to the candidate that welcomes this member."""
    end = time.monotonic() + limit
    while True:
        problems = {}
        for candidate in candidates:
            host, _, port = candidate.rpartition(":")
            try:
                link = _Link(socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS))
            except OSError as error:
                problems[candidate] = str(error)
                continue
            try:
                link.send(hello)
                answer = link.receive(time.monotonic() + _WELCOME_SECONDS)
            except (OSError, ValueError) as error:
                answer = {}
                problems[candidate] = f"it does not speak as a scheduler: {error}"
            if answer.get("welcome"):
                return link
            link.close()
            if answer.get("stranger"):
                problems[candidate] = f"{_REFUSED}: {answer.get('refused')}"
            elif "refused" in answer:
                raise _refusal(str(answer["refused"]), cluster)
        words = "; ".join(f"{candidate}: {problem}" for candidate, problem in problems.items())
        if all(_REFUSED in problem for problem in problems.values()):
            raise WorldError(f"No scheduler of this job ({cluster.source}) is where it should be. {words}.")
        if time.monotonic() > end:
            who = "The scheduler" if cluster.scheduler_apart else "Server 0, which is the scheduler,"
            raise StallError(f"{who} did not come within {limit:g} s (HVDX_START_TIMEOUT). {words}.")
        time.sleep(_AGAIN_SECONDS)


def _contact(raw: Any) -> Contact:
    host, interfaces, ports = raw
    return Contact(str(host), tuple(interfaces), tuple(ports))
