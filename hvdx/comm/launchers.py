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


_MARKS = (
    ("horovodrun (Gloo)", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("an MPI launcher of the MPICH family", "PMI_SIZE", "PMI_RANK"),
    ("hvdxrun", "HVDX_EXPECTED_SIZE", "HVDX_INDEX"),
    ("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def detect(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started this process, or None for a process started by hand.

    srun counts only inside a job step; in a batch script it has started one process, whatever the number of tasks. In a
    job with parameter servers hvdxrun's word stands alone: workers are its ranks, and a server is none.
    """
    if environ.get("HVDX_ROLE") == "server":
        return None
    for name, size_variable, rank_variable in _MARKS:
        try:
            size = int(environ[size_variable])
            rank = int(environ.get(rank_variable, "0"))
        except (KeyError, ValueError):
            continue
        if name.startswith("Slurm") and environ.get("SLURM_STEP_ID", "batch") in {"batch", "4294967291"}:
            continue
        return Launcher(name, size, rank, size_variable)
    return None


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
