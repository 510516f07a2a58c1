"""The scheduler of a job with servers: where all members meet, and which knows who has left and why.

A thread of hvdxrun, of server 0, or a process of its own (DMLC_ROLE=scheduler); only the standard library.
"""

from __future__ import annotations

import hmac
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from hvdx.launch.json_lines import LONGEST
from hvdx.launch.line_server import Connection, LineServer

UNNUMBERED = -1
CLOSED = "its connection to the scheduler closed without a goodbye"
_ROLES = ("worker", "server")
_TICK = 0.5
_NAMES_AT_ONCE = 8


@dataclass(frozen=True)
class Left:
    """A member that has left: why in words, and whether in good order."""

    role: str
    index: int
    reason: str
    orderly: bool


@dataclass(frozen=True)
class Job:
    """What the scheduler knows of the job from the start.

    Args:
        workers, servers: how many there are.
        token: what every member presents.
        limit: seconds from the first member's coming to the last's (HVDX_START_TIMEOUT).
    """

    workers: int
    servers: int
    token: str = field(repr=False)
    limit: float

    @property
    def total(self) -> int:
        """How many members there are."""
        return self.workers + self.servers

    def count(self, role: str) -> int:
        """Return how many members of a role there are; 0 for an unknown one."""
        return {"worker": self.workers, "server": self.servers}.get(role, 0)


@dataclass
class _Member:
    role: str
    index: int
    contact: Any

    @property
    def host(self) -> str:
        return str(self.contact[0]) if isinstance(self.contact, list) and self.contact else "an unknown host"


class Scheduler:
    """Serves one job; `run` it, or `start` it as a thread.

    Args:
        listener: from `line_server.listen`.
        job: what is known of it.
        told: seconds in which the launcher may tell why a connection has closed, before the others hear of it.
        impatient: whether the limit counts from the start, and `run` returns when the members could not meet.
    """

    def __init__(self, listener: socket.socket, job: Job, told: float = 0.0, impatient: bool = False) -> None:
        self.failure: str | None = None
        """Why the members could not meet."""
        self._server = LineServer(listener, self._take, self._lost)
        self.port = self._server.port
        self._job = job
        self._told = told
        self._impatient = impatient
        self._until = time.monotonic() + job.limit if impatient else None
        self._met = False
        self._stopped = False
        self._left: dict[tuple[str, int], Left] = {}
        self._closing: dict[tuple[str, int], float] = {}
        self._reports: queue.SimpleQueue[Left] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self.run, name="hvdx-scheduler", daemon=True)

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()

    def report(self, left: Left) -> None:
        """Take the launcher's word that a member's process has ended; from any thread."""
        self._reports.put(left)
        self._server.wake()

    def close(self) -> None:
        """End at once; from any thread."""
        self._stopped = True
        self._server.wake()
        self.join(5.0)

    def join(self, seconds: float) -> None:
        """Wait until all have left, at most some seconds."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def run(self) -> list[Left]:
        """Serve until all members have left; return who left and why, in the order of leaving."""
        try:
            while not self._stopped and not self._over():
                self._server.poll(self._told / 4 if self._closing else _TICK)
                while not self._reports.empty():
                    self._take_report(self._reports.get())
                self._check_times()
        finally:
            self._server.close()
        return list(self._left.values())

    def _over(self) -> bool:
        return len(self._left) == self._job.total or (self._impatient and self.failure is not None)

    def _members(self) -> Iterator[tuple[Connection, _Member]]:
        for connection in list(self._server.connections):
            if connection.known is not None and not connection.finished:
                yield connection, connection.known

    # -- the meeting -----------------------------------------------------------------------------------------------

    def _take(self, connection: Connection, message: dict[str, Any]) -> None:
        if connection.known is None:
            hello = message.get("hello")
            self._introduce(connection, hello if isinstance(hello, dict) else {})
        elif "goodbye" in message and self._met:
            self._server.finish(connection)
            self._leave(Left(connection.known.role, connection.known.index, str(message["goodbye"]), True))

    def _introduce(self, connection: Connection, hello: dict[str, Any]) -> None:
        if not hmac.compare_digest(str(hello.get("token", "")).encode(), self._job.token.encode()):
            sentence = "it presents another token than this job's"
            self._server.finish(connection, {"refused": sentence, "stranger": True})
            return
        role, index = str(hello.get("role")), hello.get("index")
        problem = self.failure or self._problem(role, index, hello)
        if problem is None:
            member = _Member(role, int(str(index)), hello.get("contact"))
            twins = [m for _, m in self._members() if (m.role, m.index) == (role, index) and index != UNNUMBERED]
            if twins:
                problem = (
                    f"two processes say that they are {role} {index}, one on {twins[0].host} and one on {member.host}. "
                    "Give each a number of its own"
                )
                self._fail(problem)
        if problem is not None:
            self._server.finish(connection, {"refused": problem})
            return
        connection.known, connection.reader.longest = member, LONGEST
        self._until = self._until or time.monotonic() + self._job.limit
        self._server.send(connection, {"welcome": True})
        if len(list(self._members())) == self._job.total:
            self._complete()

    def _problem(self, role: str, index: Any, hello: dict[str, Any]) -> str | None:
        if self._met:
            return "the members of this job have already met, and nobody can come later"
        job, said = self._job, (hello.get("workers"), hello.get("servers"))
        if said != (job.workers, job.servers):
            return (
                f"it believes in {said[0]} worker(s) and {said[1]} server(s), but the scheduler was told "
                f"{job.workers} and {job.servers}"
            )
        last = job.count(role) - 1
        if not isinstance(index, int) or not UNNUMBERED <= index <= last:
            return f"there is no {role} {index} in this job: the numbers go from 0 to {last}"
        if sum(member.role == role for _, member in self._members()) > last and index == UNNUMBERED:
            return f"all {last + 1} {role}(s) have already come"
        return None

    def _complete(self) -> None:
        present = [member for _, member in self._members()]
        for role in _ROLES:
            free = iter(self._absent(role))
            for member in present:
                if member.role == role and member.index == UNNUMBERED:
                    member.index = next(free)
        self._met, self._until = True, None
        ordered = sorted(present, key=lambda member: member.index)
        told = {role: [member.contact for member in ordered if member.role == role] for role in _ROLES}
        for connection, member in self._members():
            self._server.send(connection, {"members": told, "index": member.index})

    def _absent(self, role: str) -> list[int]:
        """Return the numbers of a role that nobody has taken."""
        taken = {member.index for _, member in self._members() if member.role == role}
        return [number for number in range(self._job.count(role)) if number not in taken]

    def _fail(self, sentence: str) -> None:
        self.failure = self.failure or sentence
        for connection, _ in self._members():
            self._server.finish(connection, {"refused": self.failure})

    def _missing(self) -> str:
        names = []
        for role in _ROLES:
            unnumbered = sum((member.role, member.index) == (role, UNNUMBERED) for _, member in self._members())
            names += [f"{role} {number} of {self._job.count(role)}" for number in self._absent(role)[unnumbered:]]
        more = f" and {len(names) - _NAMES_AT_ONCE} others" if len(names) > _NAMES_AT_ONCE else ""
        return ", ".join(names[:_NAMES_AT_ONCE]) + more

    # -- leaving ---------------------------------------------------------------------------------------------------

    def _lost(self, connection: Connection) -> None:
        member = connection.known
        if member is None or connection.finished:
            return
        if not self._met:
            name = member.role if member.index == UNNUMBERED else f"{member.role} {member.index}"
            self._fail(f"{name} on {member.host} left before all had met: {CLOSED}")
        elif (member.role, member.index) not in self._left:
            self._closing[member.role, member.index] = time.monotonic() + self._told

    def _take_report(self, left: Left) -> None:
        known = self._left.get((left.role, left.index))
        if not self._met:
            self._fail(f"{left.role} {left.index} {left.reason} before all had met")
            self._left[left.role, left.index] = left
        elif known is None or not left.orderly:
            self._leave(left)

    def _leave(self, left: Left) -> None:
        self._closing.pop((left.role, left.index), None)
        self._left[left.role, left.index] = left
        for connection, _ in self._members():
            self._server.send(connection, {"left": asdict(left)})

    def _check_times(self) -> None:
        now = time.monotonic()
        for (role, index), until in list(self._closing.items()):
            if now >= until:
                self._leave(Left(role, index, CLOSED, False))
        if self._until is not None and now > self._until and not self._met and self.failure is None:
            self._fail(
                f"{self._missing()} did not come within {self._job.limit:g} s (HVDX_START_TIMEOUT); of "
                f"{self._job.total} members {len(list(self._members()))} came"
            )
