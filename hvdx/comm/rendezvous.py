"""How the ranks of the tensorflow communicator find each other before TensorFlow's servers run."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdx import environment
from hvdx.comm.addresses import Contact, contact, free_port, reachable
from hvdx.comm.launchers import Launcher, detect
from hvdx.comm.tf_config import is_address, parse
from hvdx.errors import ConfigurationError, MissingDependencyError, StallError, WorldError

_LAST_REQUEST_SECONDS = 5.0


@dataclass(frozen=True)
class Meeting:
    """Where TensorFlow's servers are, and which one is this rank's.

    Args:
        rank: this rank.
        cluster: host:port of every rank, by job ("chief", "worker"), in the order of ranks.
        hosts: what tells the hosts apart, one entry a rank.
        met: whether the ranks have told each other that they are there.
    """

    rank: int
    cluster: Mapping[str, tuple[str, ...]]
    hosts: tuple[str, ...]
    met: bool = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of every rank."""
        return tuple(address for job in self.cluster.values() for address in job)

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return self.hosts[: self.rank].count(self.hosts[self.rank])

    @property
    def task(self) -> tuple[str, int]:
        """This rank's job and number in it, as TensorFlow counts."""
        index = self.rank
        for job, addresses in self.cluster.items():
            if index < len(addresses):
                return job, index
            index -= len(addresses)
        raise AssertionError(f"rank {self.rank} is not in {self.cluster}")


def meet(environ: Mapping[str, str]) -> Meeting:
    """Return where everybody is: from TF_CONFIG, from HVDX_TF_ADDRESSES, or told each other by the launcher's means.

    Raises:
        ConfigurationError: a variable cannot be used.
        WorldError: nothing says who the ranks are.
    """
    if environ.get("TF_CONFIG"):
        return from_tf_config(environ["TF_CONFIG"])
    launcher = detect(environ)
    listed = environment.TF_ADDRESSES.read(environ)
    if listed is not None:
        return from_list(listed, launcher)
    if launcher is None:
        raise WorldError(
            "The tensorflow communicator has nothing that says who the ranks are. Start the program with `hvdxrun`, "
            "`mpirun` or `horovodrun`, or give every process TF_CONFIG."
        )
    own = contact(free_port()).pack()
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        return from_contacts(launcher.rank, _tell_by_horovodrun(own, launcher, environ))
    return from_contacts(*_tell_by_mpi(own, launcher))


def from_tf_config(text: str) -> Meeting:
    """Return the meeting that TF_CONFIG describes; the chief, where there is one, is rank 0.

    Raises:
        ConfigurationError: it is malformed, or this process is none of those that train.
    """
    config = parse(text)
    if config.rank is None or not config.training:
        raise ConfigurationError(
            "TF_CONFIG cannot be used by the tensorflow communicator: it needs `cluster` with `worker` (and perhaps "
            f"`chief`), and `task` with the type and index of one of them. Received: {text!r}."
        )
    cluster = config.training
    return Meeting(config.rank, cluster, tuple(_host(a) for addresses in cluster.values() for a in addresses))


def from_list(text: str, launcher: Launcher | None) -> Meeting:
    """Return the meeting that HVDX_TF_ADDRESSES describes, where a launcher says which rank this is."""
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    if not addresses or not all(map(is_address, addresses)):
        raise ConfigurationError(f"HVDX_TF_ADDRESSES must be host:port of every rank, by comma. Received: {text!r}.")
    if launcher is None:
        raise WorldError(
            "HVDX_TF_ADDRESSES lists the ranks, but no launcher says which of them this process is. Start the program "
            "with one, or give every process TF_CONFIG instead."
        )
    if launcher.size != len(addresses):
        raise WorldError(
            f"HVDX_TF_ADDRESSES lists {len(addresses)} rank(s), but {launcher.name} started {launcher.size} "
            f"({launcher.variable}). Received: {text!r}."
        )
    return Meeting(launcher.rank, {"worker": addresses}, tuple(_host(address) for address in addresses))


def from_contacts(rank: int, contacts: list[Contact]) -> Meeting:
    """Return the meeting of ranks that have told each other their contacts; a contact's first port is TensorFlow's."""
    addresses = tuple(f"{host}:{c.ports[0]}" for host, c in zip(reachable(contacts), contacts, strict=True))
    return Meeting(rank, {"worker": addresses}, tuple(c.host for c in contacts), met=True)


def unreachable(meeting: Meeting) -> list[int]:
    """Return the ranks at whose address nobody listens."""
    result = []
    for rank, address in enumerate(meeting.addresses):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            result.append(rank)
    return result


def _host(address: str) -> str:
    return str(address).rpartition(":")[0]


def _tell_by_mpi(own: bytes, launcher: Launcher) -> tuple[int, list[Contact]]:
    try:
        from hvdx.comm.mpi_library import MPI
    except MissingDependencyError as error:
        raise MissingDependencyError(
            f"Under {launcher.name} the tensorflow communicator lets the ranks find each other by MPI: {error} "
            "Or list host:port of every rank in HVDX_TF_ADDRESSES, or give every process TF_CONFIG."
        ) from None
    told: list[Any] = MPI.COMM_WORLD.allgather(own)
    return MPI.COMM_WORLD.Get_rank(), [Contact.unpack(raw) for raw in told]


def _tell_by_horovodrun(own: bytes, launcher: Launcher, environ: Mapping[str, str]) -> list[Contact]:
    """Use the key-value store that horovodrun keeps for its Gloo ranks: plain HTTP, scope and key in the path."""
    address, port = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    base = f"http://{address}:{port}/hvdx_contacts"
    limit = environment.START_TIMEOUT.read()
    end = time.monotonic() + limit
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(urllib.request.Request(f"{base}/{launcher.rank}", own, method="PUT"), timeout=limit).close()
    contacts = []
    for rank in range(launcher.size):
        while True:
            try:
                with opener.open(f"{base}/{rank}", timeout=_LAST_REQUEST_SECONDS) as answer:
                    contacts.append(Contact.unpack(answer.read()))
                break
            except (urllib.error.URLError, TimeoutError) as error:
                if time.monotonic() > end:
                    raise StallError(
                        f"Rank {rank} did not come within {limit:g} s (HVDX_START_TIMEOUT): {error}."
                    ) from None
                time.sleep(0.05)
    return contacts
