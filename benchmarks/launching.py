"""The command lines and variables with which the ranks of a job are started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.catalogue import Homes, Kind, Launcher
from benchmarks.link import DEVICE
from benchmarks.workloads import ROOT
from hvdx.comm.addresses import free_port
from hvdx.launch.threads import cores_of_this_host, divide
from tests.launch.two_hosts import ADDRESSES, PORT, TwoHosts

_MARKS = ("OMPI_COMM_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "HOROVOD_GLOO_", "HOROVOD_RANK", "HOROVOD_SIZE")
"""What a launcher leaves: the jobs are none of its."""
_GLOO_SECONDS = "3600"
"""Ranks that are stopped between turns keep Gloo waiting for long."""


@dataclass(frozen=True)
class Hosts:
    """Where ranks run: on this machine (`pair` is None), or half of them on each of two hosts."""

    pair: TwoHosts | None = None

    @property
    def names(self) -> list[str]:
        """The hosts' names."""
        return ["localhost"] if self.pair is None else list(ADDRESSES)

    def on(self, host: str, line: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host."""
        return list(line) if self.pair is None else self.pair.on(host, line)

    def address(self, host: str) -> str:
        """Return the address at which the ranks of a host are reached."""
        return "127.0.0.1" if self.pair is None else ADDRESSES[host]


@dataclass(frozen=True)
class Command:
    """A process to start: of a launcher, or of a rank."""

    line: list[str]
    environ: dict[str, str] = field(repr=False)


def commands(kind: Kind, ranks: int, rank_line: Sequence[str], homes: Homes, hosts: Hosts) -> list[Command]:
    """Return what to start.

    Args:
        kind: the job.
        ranks: how many ranks, in equal parts on the hosts.
        rank_line: arguments of Python for a rank.
        homes: the environments.
        hosts: where.
    """
    python = str(homes.python(kind))
    here = [python, *rank_line]
    environ = _environ(kind, homes)
    each = ranks // len(hosts.names)
    listed = ",".join(f"{name}:{each}" for name in hosts.names)
    if hosts.pair is not None:
        # Both hosts run on the cores of this machine, which Open MPI cannot know: its ranks would spin in turns of the
        # scheduler, and take ten times as long.
        environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if kind.launcher is Launcher.HVDXRUN:
        # hvdxrun divides the cores by itself, on each host.
        options = [] if hosts.pair is None else _hvdxrun_on_two(hosts.pair, listed, kind, environ)
        line = [python, "-m", "hvdx.launch.hvdxrun", "-np", str(ranks), *options, *here]
        return [Command(hosts.on(hosts.names[0], line), environ)]
    environ |= divide(cores_of_this_host(), each, environ).assign
    if kind.launcher is Launcher.HOROVODRUN:
        options = [] if hosts.pair is None else ["-p", str(PORT), "-i", hosts.pair.key]
        environ |= {"HOROVOD_GLOO_TIMEOUT_SECONDS": _GLOO_SECONDS}
        line = [python, "-m", "horovod.runner.launch", "--gloo", "-np", str(ranks), "-H", listed, *options, *here]
        return [Command(hosts.on(hosts.names[0], line), environ)]
    places = [name for name in hosts.names for _ in range(each)]
    marks = _tensorflow(places, hosts) if kind.home == "main" else _torch(places, hosts)
    return [Command(hosts.on(place, here), environ | mark) for place, mark in zip(places, marks, strict=True)]


def _hvdxrun_on_two(pair: TwoHosts, listed: str, kind: Kind, environ: Mapping[str, str]) -> list[str]:
    passed = ["PYTHONPATH", "LD_LIBRARY_PATH", "MPI4PY_LIBMPI", *kind.environ]
    exports = [word for name in passed if name in environ for word in ("-x", name)]
    return ["-p", str(PORT), "-i", pair.key, "--network-interfaces", DEVICE, "-H", listed, *exports]


def _tensorflow(places: Sequence[str], hosts: Hosts) -> list[dict[str, str]]:
    cluster = {"worker": [f"{hosts.address(place)}:{free_port()}" for place in places]}
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}
        for index in range(len(places))
    ]


def _torch(places: Sequence[str], hosts: Hosts) -> list[dict[str, str]]:
    common = {"MASTER_ADDR": hosts.address(places[0]), "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(places))}
    if hosts.pair is not None:
        common["GLOO_SOCKET_IFNAME"] = DEVICE
    return [common | {"RANK": str(rank)} for rank in range(len(places))]


def _environ(kind: Kind, homes: Homes) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_MARKS)}
    environ.pop("TF_CONFIG", None)
    path = environ.get("PATH", os.defpath)
    own = [str(homes.python(kind).parent), path]
    if kind.home == "intel":
        library = homes.intel / "lib"
        environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(library), environ.get("LD_LIBRARY_PATH")]))
        environ["MPI4PY_LIBMPI"] = str(library / "libmpi.so.12")
        environ["I_MPI_ROOT"] = str(homes.intel)
        own.insert(0, str(homes.intel / "bin"))
    return environ | {
        "PATH": os.pathsep.join(own),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
    } | kind.environ  # fmt: skip


def ranks_of(kind: Kind, ranks: int) -> int:
    """Return how many ranks a job has where others have `ranks`."""
    return 1 if kind.alone else ranks


def rank_line(kind: Kind, folder: Path) -> list[str]:
    """Return the arguments of Python that start a rank of a job whose socket and gate are in a folder."""
    line = ["-m", "benchmarks.rank", "--socket", str(folder / "socket"), "--gate", str(folder / "gate")]
    return [*line, "--job", kind.name, "--peer", kind.peer, "--argument", kind.argument]
