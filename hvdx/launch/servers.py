"""hvdxrun's part in a job with servers: it is the scheduler, and knows what a worker's or a server's end means."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from types import TracebackType

from hvdx import environment
from hvdx.comm.addresses import LOOPBACK, contact
from hvdx.errors import LaunchError
from hvdx.launch.line_server import listen
from hvdx.launch.plan import Plan
from hvdx.launch.report import Ending
from hvdx.launch.scheduler import Job, Left, Scheduler

# The process beside a member tells how it ended within this time of its connection's end.
_TOLD_SECONDS = 0.5


class Servers:
    """Watches the ends of workers and servers; a context, in which the scheduler works.

    Args:
        plan: what is started.
        environ: the members' environment.
        go_on: whether the job goes on without a worker that has died.
    """

    def __init__(self, plan: Plan, environ: Mapping[str, str], go_on: bool) -> None:
        self._workers, self._servers = plan.np - plan.servers, plan.servers
        self._go_on = go_on
        self._grace = environment.SERVER_GRACE.read(environ)
        self._endings: dict[tuple[str, int], Ending] = {}
        self._lost: list[Ending] = []
        self._workers_gone: float | None = None
        self._ended = False
        token = secrets.token_hex(16)
        job = Job(self._workers, self._servers, token, environment.START_TIMEOUT.read(environ))
        try:
            self._scheduler = Scheduler(listen(everywhere=plan.remote), job, told=_TOLD_SECONDS)
        except OSError as error:
            raise LaunchError(f"The scheduler cannot listen on this host: {error.strerror}.") from None
        own = contact(self._scheduler.port)
        hosts = [address.split("/")[0] for address in own.interfaces] + [own.host] if plan.remote else [LOOPBACK]
        root = ",".join(f"{host}:{self._scheduler.port}" for host in hosts)
        self.variables = {environment.ROOT.name: root, environment.TOKEN.name: token}
        """What the members need to find the scheduler."""

    def __enter__(self) -> Servers:
        self._scheduler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._scheduler.close()

    def ended(self, ending: Ending) -> tuple[list[str], bool]:
        """Take the end of a worker or server; return the lines to show now, and whether it ends the job."""
        self._endings[ending.role, ending.index] = ending
        self._scheduler.report(Left(ending.role, ending.index, ending.words, ending.code == 0))
        if sum(role == "worker" for role, _ in self._endings) == self._workers:
            self._workers_gone = time.monotonic()
        if ending.code == 0:
            return [], False
        if not self._go_on or ending.role == "server":
            return [], True
        if any(one.role == "server" and one.code != 0 for one in self._endings.values()):
            return [], False  # that server's end is the cause
        self._lost.append(ending)
        last = len(self._lost) == self._workers
        return [f"[hvdxrun] {ending}{'' if last else '; the others go on'}\n"], False

    def overdue(self) -> str | None:
        """Return the sentence on servers that still run long after the last worker, once."""
        if self._ended or self._workers_gone is None or time.monotonic() - self._workers_gone < self._grace:
            return None
        running = [f"server {index}" for index in range(self._servers) if ("server", index) not in self._endings]
        self._ended = bool(running)
        if not running:
            return None
        return (
            f"[hvdxrun] {', '.join(running)} still ran {self._grace:g} s after the last worker had ended "
            f"({environment.SERVER_GRACE.name}): ended\n"
        )

    def code(self, launcher: int) -> int:
        """Return the exit code of a job in which nothing failed, by that of MPI's launcher."""
        if self._lost and len(self._lost) == self._workers:
            return self._lost[0].code
        return 0 if self._ended else launcher

    def closing(self) -> list[str]:
        """Return the last lines: who was lost on the way."""
        if len(self._lost) == self._workers:
            return [f"[hvdxrun] all workers were lost; the first: {self._lost[0]}\n"]
        return [f"[hvdxrun] lost on the way: {ending}\n" for ending in self._lost]
