"""Which launcher started this process, and how many ranks it says there are: read from the environment only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """A launcher that left its marks in the environment.

    Args:
        name: what it is called.
        size: the number of ranks it says it started.
        rank: this process's rank, as it says.
        variable: the variable that gave the size.
    """

    name: str
    size: int
    rank: int
    variable: str


_SRUN = ("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
_MARKS = (
    ("horovodrun (Gloo)", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("an MPI launcher of the MPICH family", "PMI_SIZE", "PMI_RANK"),
    ("hvdxrun", "HVDX_EXPECTED_SIZE", "HVDX_INDEX"),
    _SRUN,
)


def detect(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started this process, or None for a process started by hand.

    srun counts only inside a job step; in a batch script it has started one process, whatever the number of tasks. In a
    job with parameter servers hvdxrun's word stands alone: workers are its ranks, and a server is none.
    """
    if environ.get("HVDX_ROLE") == "server":
        return None
    return next((found for mark in _MARKS if (found := _read(environ, *mark)) is not None), None)


def by_srun(environ: Mapping[str, str]) -> Launcher | None:
    """Return srun's word where srun itself started this process, else None.

    With --mpi=pmi2 it leaves the marks of MPICH's launchers as well, with its own numbers. Where it started the daemons
    of another launcher its marks are handed down, and count the daemons.
    """
    first, srun = detect(environ), _read(environ, *_SRUN)
    if first is None or srun is None or (first.size, first.rank) != (srun.size, srun.rank):
        return None
    return srun if first.variable in {"PMI_SIZE", srun.variable} else None


def _read(environ: Mapping[str, str], name: str, size_variable: str, rank_variable: str) -> Launcher | None:
    try:
        size = int(environ[size_variable])
        rank = int(environ.get(rank_variable, "0"))
    except (KeyError, ValueError):
        return None
    if name.startswith("Slurm") and environ.get("SLURM_STEP_ID", "batch") in {"batch", "4294967291"}:
        return None
    return Launcher(name, size, rank, size_variable)


def by_horovodrun(environ: Mapping[str, str]) -> str | None:
    """Return "gloo" or "mpi" where Horovod's launcher started this process that way, else None.

    Over Gloo it tells each rank its place. Over MPI it leaves one mark of its own, the network interfaces for NCCL, on
    a plain mpirun; hvdxrun hands through what its caller had set, so there the mark says nothing.
    """
    if "HOROVOD_RANK" in environ or "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        return "gloo"
    launcher = detect(environ)
    by_mpi = launcher is not None and launcher.variable in {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}
    return "mpi" if by_mpi and "NCCL_SOCKET_IFNAME" in environ and "HVDX_EXPECTED_SIZE" not in environ else None
