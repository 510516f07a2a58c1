"""What is to be started, decided before any process runs: the input of every way of starting ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hvdx.launch.hosts import Host

# What reaches the ranks on other hosts; the ranks on this one inherit everything.
_FORWARDED_NAMES = frozenset(
    {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "LANG", "LC_ALL"}
)
_FORWARDED_PREFIXES = (
    "HVDX_", "HOROVOD_", "TF_", "TF2_", "OMP_", "KERAS_", "NCCL_", "XLA_", "MPI4PY_", "PYTHON", "UCX_", "FI_",
)  # fmt: skip
# Variables by which a scheduler says that it has given this job hosts; MPI's launchers read them themselves.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "COBALT_JOBID")


@dataclass(frozen=True)
class Plan:
    """One start of `np` processes.

    Args:
        np: number of processes: ranks, or workers and servers.
        servers: how many of them are servers.
        hosts: the hosts with their ranks, as `assign` gave them; empty leaves the choice to the scheduler.
        remote: whether ranks may run on another host than this one.
        command: what every rank runs, with hvdx's own process in front.
        forward: names of the environment variables that other hosts get.
        ssh_arguments: arguments for ssh, such as ("-p", "2222").
        interfaces: network interfaces to use, as named by the system; empty leaves the choice to MPI.
        root: whether the launcher runs as root.
    """

    np: int
    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    remote: bool = False
    forward: tuple[str, ...] = ()
    ssh_arguments: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    root: bool = False
    servers: int = 0


def forwarded(environ: Mapping[str, str], also: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of the variables that ranks on other hosts need, sorted; `also` are the user's `-x`."""
    names = {name for name in environ if name in _FORWARDED_NAMES or name.startswith(_FORWARDED_PREFIXES)}
    return tuple(sorted(names | set(also)))


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether a scheduler has given this job its hosts."""
    return any(environ.get(name) for name in _ALLOCATIONS)


def server_ranks(total: int, servers: int) -> tuple[int, ...]:
    """Return which of `total` processes are the servers: evenly spread, so that hosts filled in order share them."""
    return tuple((number + 1) * total // servers - 1 for number in range(servers))
