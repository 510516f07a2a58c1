"""A process's part in a job with parameter servers: a server serves and ends there, a worker goes on with the others.

`hvd.init()` and `strategy("parameter_server")` come here, whichever is called first, so that the same program does for
all members. What a program does before runs on the servers too: keep it short, but define optimizers of your own there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import tensorflow as tf

from hvdx import logs
from hvdx.comm.addresses import LOOPBACK, contact
from hvdx.distribute.cluster import Cluster, Role, resolve
from hvdx.distribute.meeting import Members, meet, run_scheduler
from hvdx.distribute.parameter_server.client import ParameterClient
from hvdx.distribute.parameter_server.collective import Collective
from hvdx.distribute.parameter_server.link import Link
from hvdx.distribute.parameter_server.server import Server
from hvdx.errors import HvdxError
from hvdx.logs import log

_FAREWELL = 10.0
_FINISHED = "finished"


class WorkerJob:
    """A worker's part in the job, after all members have met.

    Args:
        cluster: the job as this process sees it.
        members: who takes part.
    """

    def __init__(self, cluster: Cluster, members: Members) -> None:
        self.worker, self.workers, self.servers = members.index, cluster.workers, cluster.servers
        self.hosts = [one.host for one in members.contacts[Role.WORKER]]
        self.server_hosts = [one.host for one in members.contacts[Role.SERVER]]
        self.source = cluster.source
        self._token, self._members = cluster.token, members
        self._clients: list[ParameterClient] = []

    def link(self, group: str) -> Link:
        """Return connections to all servers, under the name of a group."""
        return Link(self._members.servers, self.worker, self._token, group, lambda: _gone(self._members, Role.SERVER))

    def client(self, **options: Any) -> ParameterClient:
        """Return a client for the next optimizer, in the same order on all workers; see `ParameterClient`."""
        made = ParameterClient(
            self._members.servers, self.worker, self.workers, self._token, group=f"optimizer {len(self._clients)}",
            departed=lambda: _gone(self._members, Role.SERVER), **options,
        )  # fmt: skip
        self._clients.append(made)
        return made

    def end(self, goodbye: Collective | None) -> None:
        """Leave the job.

        Args:
            goodbye: with what to tell the servers that this worker has finished; None where it has failed.
        """
        if goodbye is None:
            return  # the end of this process's connections tells the others
        for client in self._clients:
            with _noted():
                client.close(done=False)
        with _noted():
            goodbye.leave(done=True, limit=_FAREWELL)
        self._members.goodbye()


def join(cluster: Cluster | None = None) -> WorkerJob:
    """Meet the other members. A worker gets its part in the job; a server serves, and the process ends here.

    Args:
        cluster: the job; what the environment says where it is None.

    Raises:
        StallError: a member did not come within HVDX_START_TIMEOUT; names it.
        WorldError: the members contradict each other.
    """
    found = cluster or resolve()
    if found.role is Role.SCHEDULER:
        run_scheduler(found)
        sys.exit(0)
    if found.role is Role.SERVER:
        _serve(found)
    return WorkerJob(found, meet(found, contact()))


def _serve(cluster: Cluster) -> NoReturn:
    with contextlib.suppress(RuntimeError):  # TensorFlow has started: then the GPUs are its already
        tf.config.set_visible_devices([], "GPU")
    alone = all(root.startswith((LOOPBACK, "localhost")) for root in cluster.root)
    server = Server(cluster.index, cluster.workers, cluster.token, host=LOOPBACK if alone else "0.0.0.0")
    members = meet(cluster, contact(int(server.address.rpartition(":")[2])))
    logs.configure(members.index, "server")
    server.index, server.departed = members.index, lambda: _gone(members, Role.WORKER)
    try:
        for stats in server.serve():
            log.info("parameter server %d: %s", members.index, stats)
    finally:
        members.goodbye()
    sys.exit(0)


def _gone(members: Members, role: Role) -> dict[int, str]:
    """Return the members of a role that are gone, with the reason; "finished" for those that ended in good order."""
    return {one.index: _FINISHED if one.orderly else one.reason for one in members.departures() if one.role is role}


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    """Note an error at the end of the job instead of raising it: what was to be done has been done."""
    try:
        yield
    except HvdxError as error:
        log.warning("%s", error)
