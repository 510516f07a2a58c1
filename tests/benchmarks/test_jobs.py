"""Which jobs a run starts and how, and a short real run: hvdx and raw MPI on two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import memory, settings
from benchmarks.catalogue import REDUCTIONS, TRAININGS, Homes, Kind
from benchmarks.gate import Gate
from benchmarks.job import Job, JobError
from benchmarks.launching import Command, Hosts, commands
from benchmarks.session import check_means, gradient
from tests.support.jobs import ROOT, processes_with

KINDS = {kind.name: kind for kind in (*REDUCTIONS, *TRAININGS)}


def homes(folder: Path) -> Homes:
    """Return environments that are not there, but for the one that runs the tests."""
    return Homes(Path(sys.executable), folder / "mpich/bin/python", folder / "intel", folder / "torch/bin/python")


def test_a_peer_that_is_missing_is_named_with_what_installs_it(tmp_path: Path) -> None:
    places = homes(tmp_path)
    assert places.missing(KINDS["hvdx mpi"]) is None
    assert "`make bench-torch`" in str(places.missing(KINDS["PyTorch DDP gloo"]))
    assert "`make bench-mpich`" in str(places.missing(KINDS["Horovod MPICH"]))
    assert "has no absent_module; `make envs`" in str(places.missing(Kind("x", "x", needs=("absent_module",))))


def test_how_ranks_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "7")
    monkeypatch.setenv("TF_CONFIG", "{}")

    def made(name: str, ranks: int) -> list[Command]:
        return commands(KINDS[name], ranks, ["-m", "x"], homes(tmp_path), Hosts())

    [one] = made("hvdx mpi", 3)
    assert one.line[1:6] == ["-m", "hvdx.launch.hvdxrun", "-np", "3", sys.executable]
    assert not {"OMPI_COMM_WORLD_SIZE", "TF_CONFIG"} & set(one.environ)
    [gloo] = made("Horovod Gloo", 2)
    assert gloo.line[1:4] == ["-m", "horovod.runner.launch", "--gloo"]
    assert float(gloo.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"]) > 600, "ranks that are stopped must not time out"
    ring = made("TensorFlow RING", 2)
    config = [json.loads(command.environ["TF_CONFIG"]) for command in ring]
    assert [one["task"]["index"] for one in config] == [0, 1]
    assert config[0]["cluster"] == config[1]["cluster"]
    assert len(set(config[0]["cluster"]["worker"])) == 2
    assert [command.environ["RANK"] for command in made("PyTorch DDP gloo", 2)] == ["0", "1"]
    assert {command.environ["OMP_NUM_THREADS"] for command in made("PyTorch DDP gloo", 64)} == {"1"}
    [intel] = made("Horovod Intel MPI", 2)
    assert intel.environ["MPI4PY_LIBMPI"] == str(tmp_path / "intel/lib/libmpi.so.12")
    assert intel.environ["PATH"].startswith(str(tmp_path / "intel/bin"))


def test_options_choose_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "gradient_sets", lambda names: [settings.Workload(name, ((1,),)) for name in names])

    def chosen(*arguments: str) -> dict[str, tuple[list[str], list[str]]]:
        options = settings.parser().parse_args(arguments)
        assert settings.check(options) is None
        return {s.name: ([w.name for w in s.workloads], [k.name for k in s.kinds]) for s in settings.settings(options)}

    usual = chosen()
    assert list(usual) == ["2 ranks", "4 ranks", "2 hosts x 2 ranks", "fit, 2 ranks"]
    assert usual["4 ranks"][0] == ["ResNet-50"]
    full = chosen("--full")
    assert list(full)[:3] == ["2 ranks", "3 ranks", "4 ranks"]
    assert {"MobileNetV2", "4 B", "256 MB"} <= set(full["3 ranks"][0])
    few = chosen("--ranks", "3", "--workloads", "small CNN", "--peers", "hvdx mpi", "--no-hosts")
    assert few == {"3 ranks": (["small CNN"], ["hvdx mpi"])}
    assert "there is no 'hvdx'" in str(settings.check(settings.parser().parse_args(["--peers", "hvdx"])))
    assert "at least 2" in str(settings.check(settings.parser().parse_args(["--ranks", "1"])))


def test_jobs_that_do_not_fit_into_memory_are_left_out_by_priority() -> None:
    big, small = (settings.Workload(name, ((count,),)) for name, count in (("big", 125_000_000), ("small", 1)))
    kinds = (KINDS["yardsticks"], KINDS["TensorFlow RING"], KINDS["Horovod Open MPI"])
    wanted = settings.Setting("2 ranks", 2, 1, (small, big), kinds)
    # Small: 2 x 0.5 GB a job. Big: 2 x 1.1 GB more for each job but the first, and for the one that has its turn.
    assert memory.needed(wanted, kinds, small) == pytest.approx(3e9, rel=1e-3)
    assert memory.needed(wanted, kinds, big) == pytest.approx(9.6e9)
    assert memory.parts(wanted, 20e9) == ([wanted], {})
    fitting, left_out = memory.parts(wanted, 10e9)
    assert [([w.name for w in part.workloads], [k.name for k in part.kinds]) for part in fitting] == [
        (["small"], ["yardsticks", "TensorFlow RING", "Horovod Open MPI"]),
        (["big"], ["yardsticks", "Horovod Open MPI"]),
    ]
    assert list(left_out) == ["TensorFlow RING (2 ranks, big)"]
    assert "10 GB of memory would be needed and 7 GB can be had" in left_out["TensorFlow RING (2 ranks, big)"]


def test_a_job_that_cannot_start_says_why_and_is_gone(tmp_path: Path) -> None:
    job = Job(Kind("x", "x"), 2, tmp_path)
    with pytest.raises(JobError, match=r"x: it ended at its start \(exit codes \[3\]\)\nboom"):
        job.start([Command([sys.executable, "-c", "print('boom'); raise SystemExit(3)"], dict(os.environ))])
    job.end()


def test_the_floor_copies_what_the_others_need_and_adds_the_rest() -> None:
    from benchmarks.peers.yardsticks import parts

    tensors = [np.arange(start, start + count) for start, count in ((0, 3), (3, 4), (7, 5))]
    buffer = np.zeros(6, int)
    found = parts(tensors, 2, 8, buffer)
    assert [list(source) for source, _ in found] == [[2], [3, 4, 5, 6], [7]]
    for source, target in found:
        target[...] = source
    assert list(buffer) == [2, 3, 4, 5, 6, 7]


def test_the_gate_says_who_is_late(tmp_path: Path) -> None:
    Gate.make(tmp_path / "gate", 3)
    first, second = (Gate(tmp_path / "gate", rank, 3) for rank in (0, 1))
    with pytest.raises(TimeoutError, match=r"\[1, 2\]"):
        first.wait(0.05)
    with pytest.raises(TimeoutError, match=r"\[2\]"):
        second.wait(0.05)


def state(pid: int) -> str:
    """Return a process's state, such as T for stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until something is so.

    Raises:
        AssertionError: it was not so within `seconds`.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_stopped_ranks_are_woken_when_the_driver_is_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as rank:
        os.kill(rank.pid, signal.SIGSTOP)
        code = (
            f"import time; from benchmarks import guardian as g\nwith g.guardian(): g.guard({rank.pid}); time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as driver:
            try:
                wait_for(lambda: any("benchmarks.guardian" in line for line in children(driver.pid)))
                time.sleep(0.5)
                assert state(rank.pid) == "T"
            finally:
                driver.kill()
        try:
            wait_for(lambda: state(rank.pid) == "S")
        finally:
            rank.kill()


def children(pid: int) -> list[str]:
    """Return the command lines of a process's children."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in found]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the driver with two ranks, the small CNN, and its sockets below a folder."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "PRTE_"))}
    return subprocess.Popen(
        [
            sys.executable, "-m", "benchmarks", "--ranks", "2", "--workloads", "small CNN", "--no-hosts", "--no-fit",
            "--output", str(folder / "results"), *arguments,
        ],
        cwd=ROOT, env=clean | {"TMPDIR": str(folder)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_driver_that_is_ended_leaves_no_ranks(tmp_path: Path) -> None:
    with start(tmp_path, "--peers", "hvdx mpi", "--rounds", "100000", "--minutes", "10") as driver:
        assert driver.stdout is not None
        try:
            assert any("the right result" in line for line in driver.stdout), "it ended by itself"
            assert processes_with(str(tmp_path / "hvdx-bench")) != []
        finally:
            driver.terminate()
        assert driver.wait(60) == 143
    assert processes_with(str(tmp_path / "hvdx-bench")) == []
    assert list(tmp_path.glob("hvdx-bench*")) == []


def test_a_short_run(tmp_path: Path) -> None:
    peers = ("--peers", "yardsticks", "hvdx mpi", "PyTorch DDP gloo", "--torch-python", str(tmp_path / "none"))
    with start(tmp_path, "--rounds", "3", *peers) as driver:
        try:
            output, _ = driver.communicate(timeout=200)
        finally:
            driver.terminate()
    assert driver.returncode == 0, output
    run = json.loads((tmp_path / "results" / "benchmark.json").read_text())
    [only] = run["sections"]
    assert set(only["seconds"]) == {
        "raw MPI",
        "memory floor",
        "memory floor, own share left",
        "empty tf.function",
        "hvdx mpi",
    }
    assert all(len(rounds) == 3 and min(map(min, rounds)) > 0 for rounds in only["seconds"].values())
    assert only["tensors"] == 8
    assert 150_000 < only["bytes"] < 250_000
    assert only["own"] > 0
    assert only["failed"] == {}
    assert "`make bench-torch`" in run["missing"]["PyTorch DDP gloo"]
    assert "MPI in use:" in run["versions"]["hvdx mpi"]
    assert "## 2 ranks, small CNN: 8 tensor(s), 195.0 kB" in output
    assert processes_with(str(tmp_path)) == []


def test_wrong_means_are_found_wherever_they_are() -> None:
    shapes = ((3,), (1000, 1000))
    means = [(gradient(index, shape, 0) + gradient(index, shape, 1)) / 2 for index, shape in enumerate(shapes)]
    check_means("x", means, shapes, 2)
    means[1][999, 999] += 0.01
    with pytest.raises(AssertionError, match="x, tensor 1"):
        check_means("x", means, shapes, 2)
    with pytest.raises(AssertionError, match="3 numbers for 1000003"):
        check_means("x", means[:1], shapes, 2)
