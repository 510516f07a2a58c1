"""train_and_evaluate as users start it: a bare mpirun, and Horovod's launcher with the horovod communicator."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.comm.native_jobs import run
from tests.support.jobs import Job

PROGRAM = str(Path(__file__).with_name("fault_program.py"))
PROGRAMS = Path(sys.executable).parent


def check(job: Job) -> None:
    assert job.code == 0, job.output
    for rank in range(2):
        assert any(f"rank {rank} began at step [0], ended with {{" in line for line in job.output.splitlines())


def communicator(job: Job) -> str:
    """Return what moved the bytes, as rank 0 says with HVDX_LOG=info."""
    line = next(line for line in job.output.splitlines() if "info: communicator" in line)
    return line.split("communicator ")[1].split(",")[0]


def test_mpirun(tmp_path: Path) -> None:
    if not (PROGRAMS / "mpirun").exists():
        pytest.skip("no mpirun in this environment")
    options = ["-np", "2", "--allow-run-as-root", "--oversubscribe"]
    command = [str(PROGRAMS / "mpirun"), *options, sys.executable, PROGRAM, str(tmp_path / "model"), "whole"]
    job = run(command, HVDX_LOG="info")
    check(job)
    assert communicator(job) == "shared_memory"


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not built here")
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_horovodrun(tmp_path: Path, controller: str) -> None:
    options = [f"--{controller}", "-np", "2"]
    if controller == "mpi":  # Horovod 0.28.1 writes -bind-to, which Open MPI 5 does not take
        options.append("--binding-args=--bind-to none --map-by slot")
    command = [str(PROGRAMS / "horovodrun"), *options, sys.executable, PROGRAM, str(tmp_path / "model"), "whole"]
    job = run(command, HVDX_LOG="info")
    check(job)
    assert communicator(job) == "horovod"
