"""A rank that fails, stops, comes late or does something else: no job hangs, and the message says who and what."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from hvdx.launch.leftovers import _NAMES as MPI_FILES
from tests.support.jobs import Job, processes_with, run_ranks

PROGRAM = """
import os, signal, sys, threading, time
import tensorflow as tf
import hvdx as hvd

what = sys.argv[1]
if what == "stop_before_init" and os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    from mpi4py import MPI  # MPI has started everywhere, and this rank never joins hvdx

    os.kill(os.getpid(), signal.SIGSTOP)
hvd.init()
rank = hvd.rank()


@tf.function
def step(x):
    return hvd.allreduce(x, name="weights")


for _ in range(3):
    step(tf.ones([4]))
if what == "all_exit" :
    sys.exit(3)
if rank == 1:
    if what == "exception":
        raise ValueError("broken on purpose")
    if what == "exit":
        sys.exit(3)
    if what == "os_exit":
        os._exit(3)
    if what == "shutdown_alone":
        hvd.shutdown()
        sys.exit(0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "barrier":
        hvd.barrier(name="the end of epoch 1")
    if what == "stop_in_payload":
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
while what == "stop_in_payload":
    hvd.allreduce(tf.ones([20_000_000]))
if what == "eager":
    try:
        hvd.allreduce(tf.ones([4 + rank]), name="weights")
    except hvd.MismatchError as error:
        print("caught", type(error).__name__)
    print("still in step:", hvd.allreduce(float(rank)).numpy())
step(tf.ones([4 + rank if what == "shape" else 4], tf.float64 if what == "dtype" and rank else tf.float32))
step(tf.ones([4]))
print("done", rank)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "fault_program.py"
    path.write_text(PROGRAM)
    return path


BOTH = pytest.mark.parametrize("comm", ["shared_memory", "mpi"])


def run(
    program: Path, what: str, timeout: float = 60, comm: str = "auto", environ: dict[str, str] | None = None
) -> Job:
    environ = {"HVDX_TIMEOUT": str(timeout), "HVDX_COMM": comm, **(environ or {})}
    job = run_ranks(2, [str(program), what], limit=200, environ=environ)
    deadline = time.monotonic() + 10
    while processes_with(str(program)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(str(program)) == [], "processes were left over"
    return job


def test_a_good_job_ends_well(program: Path) -> None:
    job = run(program, "none")
    assert job.code == 0, job.output
    assert "done 0" in job.output
    assert "done 1" in job.output


@pytest.mark.parametrize(
    ("what", "code", "texts"),
    [
        ("exception", 1, ["ValueError: broken on purpose"]),
        ("exit", 3, ["rank 1: leaving: the end of the program", "rank 0: allreduce (Average)"]),
        ("os_exit", 3, []),
        ("kill", 137, ["SIGKILL"]),
        ("all_exit", 3, []),
    ],
)
def test_one_rank_ends_all_and_its_exit_code_counts(program: Path, what: str, code: int, texts: list[str]) -> None:
    job = run(program, what)
    assert job.code == code, job.output
    for text in texts:
        assert text in job.output
    assert "done" not in job.output


@pytest.mark.parametrize(
    ("what", "mine"),
    [
        ("shape", "rank 1: allreduce (Average) of 1 tensor(s) (weights 5 float32)"),
        ("dtype", "rank 1: allreduce (Average) of 1 tensor(s) (weights 4 float64)"),
        ("barrier", "rank 1: barrier: the end of epoch 1"),
    ],
)
def test_different_calls_raise_at_once_on_both_ranks(program: Path, what: str, mine: str) -> None:
    job = run(program, what)
    assert job.code == 1, job.output
    assert "MismatchError" in job.output
    assert "rank 0: allreduce (Average) of 1 tensor(s) (weights 4 float32)" in job.output
    assert mine in job.output
    assert "done" not in job.output


@BOTH
def test_an_eager_mismatch_has_its_own_type_and_the_ranks_stay_in_step(program: Path, comm: str) -> None:
    job = run(program, "eager", comm=comm)
    assert job.code == 0, job.output
    assert job.output.count("caught MismatchError") == 2
    assert job.output.count("still in step: 0.5") == 2


@BOTH
def test_a_stopped_rank_is_named_within_the_limit(program: Path, comm: str) -> None:
    job = run(program, "stop", timeout=5, comm=comm)
    assert job.code == 1, job.output
    assert "StallError: rank 1 did not come to: allreduce (Average) of 1 tensor(s) (weights 4 float32)" in job.output
    assert "The last thing done together" in job.output


def test_a_rank_that_does_not_come_to_init_is_named(program: Path) -> None:
    job = run(program, "stop_before_init", environ={"HVDX_START_TIMEOUT": "6"})
    assert job.code != 0, job.output
    assert "StallError: rank 1 did not come to: init: the start of hvdx" in job.output
    assert "HVDX_START_TIMEOUT" in job.output


def test_after_shutdown_a_failing_rank_still_ends_the_job(program: Path) -> None:
    job = run(program, "shutdown_alone", timeout=20)
    assert job.code == 1, job.output
    assert "rank 1: leaving: the end of the program" in job.output


@BOTH
def test_a_rank_stopped_in_the_middle_of_a_payload_is_noticed(program: Path, comm: str) -> None:
    job = run(program, "stop_in_payload", timeout=5, comm=comm)
    assert job.code != 0, job.output
    assert "rank 1 did not come to" in job.output or "stopped in the middle of: allreduce" in job.output


@pytest.mark.timeout(600)
def test_twenty_runs_in_a_row_end_well(tmp_path: Path) -> None:
    program = tmp_path / "short_program.py"
    program.write_text(
        "import hvdx as hvd\nhvd.init(); hvd.init()\nhvd.barrier()\nprint('rank', hvd.rank(), 'of', hvd.size())\n"
        "for line in open('/proc/self/maps'):\n    if '/dev/shm/' in line:\n        print('uses', line.split()[5])\n"
    )
    used: set[str] = set()
    for _ in range(20):
        job = run_ranks(2, [str(program)], environ={"HVDX_COMM": "auto"})
        assert job.code == 0, job.output
        assert "rank 0 of 2" in job.output
        assert "rank 1 of 2" in job.output
        used |= set(re.findall(r"uses (\S+)", job.output))
    assert any(MPI_FILES.match(Path(name).name) for name in used)
    assert [name for name in used if Path(name).exists()] == []
    assert processes_with(str(program)) == []
