"""Detecting the launcher, and the world's shape, from plain values."""

from __future__ import annotations

import pytest

from hvdx.comm import choose
from hvdx.comm.communicator import Topology
from hvdx.comm.launchers import detect
from hvdx.comm.single import SingleCommunicator
from hvdx.errors import ConfigurationError, WorldError


@pytest.mark.parametrize(
    ("environ", "name", "size", "rank"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, "Open MPI", 4, 3),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "MPICH", 2, 1),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, "horovodrun", 2, 0),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_STEP_ID": "0"}, "Slurm", 8, 5),
    ],
)
def test_launchers_are_known_by_their_marks(environ: dict[str, str], name: str, size: int, rank: int) -> None:
    launcher = detect(environ)
    assert launcher is not None
    assert name in launcher.name
    assert (launcher.size, launcher.rank) == (size, rank)


def test_a_process_started_by_hand_has_no_launcher() -> None:
    assert detect({"PATH": "/bin"}) is None
    assert detect({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "batch"}) is None
    assert choose.automatic({}) == "single"


def test_ranks_that_are_alone_though_more_were_started_are_refused() -> None:
    class Alone(SingleCommunicator):
        name = "mpi"

    with pytest.raises(WorldError, match=r"started 4 processes.*sees 1"):
        choose.check_size(Alone(), {"PMI_SIZE": "4"})
    choose.check_size(Alone(), {"PMI_SIZE": "1"})


@pytest.mark.parametrize("comm", ["nccl", "MPI2", ""])
def test_an_unknown_communicator_is_refused_by_name(comm: str) -> None:
    with pytest.raises(ConfigurationError, match="single, shared_memory, mpi, horovod, tensorflow"):
        choose.create(comm)


def test_something_that_is_no_communicator_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="mpi4py communicator"):
        choose.create(3.5)


def test_topology_of_unequal_hosts() -> None:
    hosts = ["a", "b", "a", "a", "b"]
    assert Topology.from_hosts(2, hosts) == Topology(2, 5, 1, 3, 0, 2)
    assert Topology.from_hosts(4, hosts) == Topology(4, 5, 1, 2, 1, 2)
    assert Topology.from_hosts(3, hosts) == Topology(3, 5, 2, 3, 0, 1)
