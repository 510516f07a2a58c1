"""Worlds that hvdxrun did not start: a bare mpirun, a communicator of the program's own, Horovod's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, run_ranks

WHO = """
import tensorflow as tf
import hvdx as hvd
hvd.init()
total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), hvd.Sum).numpy()[0]
print(f"rank {hvd.rank()} of {hvd.size()}, local {hvd.local_rank()} of {hvd.local_size()}, "
      f"cross {hvd.cross_rank()} of {hvd.cross_size()}, homogeneous {hvd.is_homogeneous()}, total {total}", flush=True)
hvd.shutdown()
"""
SPLIT = """
from mpi4py import MPI
import tensorflow as tf
import hvdx as hvd
mine = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
hvd.init(comm=mine)
total = hvd.allreduce(tf.constant([MPI.COMM_WORLD.rank + 1.0]), hvd.Sum).numpy()[0]
print(f"{MPI.COMM_WORLD.rank} is rank {hvd.rank()} of {hvd.size()}, total {total}", flush=True)
"""
PLANS = """
import tensorflow as tf
import hvdx as hvd
hvd.init()
hvd.grouped_allreduce([tf.ones([300], tf.float32), tf.ones([300], tf.float32), tf.ones([2], tf.int32)], hvd.Sum)
"""


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(text)
    return str(path)


def test_bare_mpirun(tmp_path: Path) -> None:
    mpirun = Path(sys.executable).parent / "mpirun"
    if not mpirun.exists():
        pytest.skip("no mpirun in this environment")
    options = ["--allow-run-as-root", "--oversubscribe", "-np", "2"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI_", "PMIX_", "PRTE_", "HVDX_"))}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [str(mpirun), *options, sys.executable, script(tmp_path, WHO)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(2):
        line = f"rank {rank} of 2, local {rank} of 2, cross 0 of 1, homogeneous True, total 3.0"
        assert line in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize("own_comm", [False, True])
@pytest.mark.parametrize("hydra", [False, True])
def test_a_launcher_of_another_mpi_is_refused(tmp_path: Path, hydra: bool, own_comm: bool) -> None:
    """Under hydra each process of Open MPI believes to be alone; MPICH itself ends under Open MPI's launcher."""
    ours = Path(sys.executable)
    other = Path(os.environ.get("HVDX_TEST_MPICH_PYTHON", ROOT / ".venv-mpich" / "bin" / "python"))
    launcher, python = (other.with_name("mpiexec"), ours) if hydra else (ours.with_name("mpirun"), other)
    if not (launcher.exists() and python.exists()):
        pytest.skip("needs both MPIs")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI_", "PMIX_", "PRTE_", "HVDX_"))}
    environ["PYTHONPATH"] = str(ROOT)
    options = [] if hydra else ["--allow-run-as-root", "--oversubscribe"]
    program = WHO.replace("hvd.init()", "from mpi4py import MPI; hvd.init(comm=MPI.COMM_WORLD)") if own_comm else WHO
    command = [str(launcher), *options, "-n", "2", str(python), script(tmp_path, program)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0, said
    assert "rank 0 of 1" not in said
    if hydra:
        assert "started 2 processes (PMI_SIZE=2), but the mpi communicator sees 1" in said


def test_a_communicator_of_the_programs_own(tmp_path: Path) -> None:
    job = run_ranks(4, [script(tmp_path, SPLIT)])
    assert job.code == 0, job.output
    for rank, total in enumerate([4.0, 6.0, 4.0, 6.0]):
        assert f"{rank} is rank {rank // 2} of 2, total {total}" in job.output


@pytest.mark.parametrize("name", ["HVDX_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD"])
def test_the_plan_is_printed_and_follows_the_threshold(tmp_path: Path, name: str) -> None:
    job = run_ranks(2, [script(tmp_path, PLANS)], environ={name: "1300", "HVDX_LOG": "debug"})
    assert job.code == 0, job.output
    for rank in range(2):
        assert f"hvdx rank {rank} debug: fusion plan: 3 buffer(s), 2,496 bytes" in job.output, job.output
