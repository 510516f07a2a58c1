"""Every example runs as its header says, on several ranks and alone: what it prints, writes and returns."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, run_ranks

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.timeout(300)
needs_scikit_learn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed in this environment"
)


def run(ranks: int, name: str, *options: str) -> str:
    """Run an example on `ranks` ranks, or with plain Python where it is 1; return what it printed."""
    command = [str(EXAMPLES / name), *options]
    if ranks > 1:
        job = run_ranks(ranks, command, limit=280)
        assert job.code == 0, job.output
        return job.output
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "PRTE_"))}
    environ["PYTHONPATH"] = str(ROOT)
    ended = subprocess.run(
        [sys.executable, *command],
        env=environ,
        text=True,
        timeout=280,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def accuracy(output: str) -> float:
    """Return the test accuracy in the closing lines."""
    return float(re.findall(r"test accuracy (\d\.\d+)", output)[-1])


def fingerprints(output: str, ranks: int) -> list[str]:
    """Return the hashes of the ranks' weights, which must have been found equal."""
    line = re.search(r"all ranks hold bit-identical weights: [\d,]+ numbers, (.*)", output)
    assert line, output
    found = line[1].strip().split(", ")
    assert len(found) == ranks
    assert len(set(found)) == 1
    return found


@pytest.mark.parametrize("name", ["all_reduce.py", "point_to_point.py"])
def test_three_ranks_end_with_their_sum(name: str) -> None:
    output = run(3, name)
    for rank, held in enumerate(("1", "2", "-3")):
        assert f"rank {rank} of 3 held {held}, ends with 0\n" in output


@pytest.mark.parametrize("name", ["all_reduce.py", "point_to_point.py"])
def test_alone_the_sum_is_ones_own(name: str) -> None:
    assert run(1, name) == "rank 0 of 1 held 1, ends with 1\n", "and TensorFlow's start-up lines are not shown"


@needs_scikit_learn
def test_keras_digits(tmp_path: Path) -> None:
    output = run(2, "keras_digits.py", "--output", str(tmp_path / "out"))
    assert accuracy(output) >= 0.97
    fingerprints(output, 2)
    assert "1,437 samples over 2 ranks: 23 steps an epoch" in output
    assert len(re.findall(r"epoch +\d+/20 .*val_accuracy", output)) == 20
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    import keras

    model = keras.models.load_model(tmp_path / "out" / "digits.keras")
    assert model.count_params() == 85_066


@needs_scikit_learn
def test_keras_digits_alone_and_resumed(tmp_path: Path) -> None:
    options = ("--output", str(tmp_path))
    assert "epoch     1/1 " in run(1, "keras_digits.py", "--epochs", "1", *options)
    resumed = run(1, "keras_digits.py", "--epochs", "2", "--resume", *options)
    assert "epoch     2/2 " in resumed
    assert "epoch     1/2 " not in resumed
    fingerprints(resumed, 1)
    again = run(1, "keras_digits.py", "--epochs", "2", "--resume", *options)
    assert accuracy(again) == accuracy(resumed), "all epochs are done, so nothing is trained"


@needs_scikit_learn
def test_custom_loop_digits() -> None:
    output = run(2, "custom_loop_digits.py", "--epochs", "15")
    assert accuracy(output) >= 0.96
    fingerprints(output, 2)
    assert len(re.findall(r"epoch +\d+  loss", output)) == 15
    fingerprints(run(1, "custom_loop_digits.py", "--epochs", "1"), 1)


@needs_scikit_learn
def test_strategy_digits(tmp_path: Path) -> None:
    output = run(2, "strategy_digits.py", "--epochs", "8", "--checkpoints", str(tmp_path / "digits.keras"))
    assert accuracy(output) >= 0.95
    fingerprints(output, 2)
    for line in (
        "strategy multi_worker",
        "replicas in sync: 2",
        "ranks: 2 (this is rank 0)",
        "shared_memory between ranks",
    ):
        assert line in output
    assert [path.name for path in tmp_path.iterdir()] == ["digits.keras"]
    for mode in ("one_device", "central_storage"):
        output = run(1, "strategy_digits.py", "--mode", mode, "--epochs", "4")
        assert accuracy(output) >= 0.9
        assert f"strategy {mode}\n" in output
        assert "strategy made by: stock TensorFlow" in output


@needs_scikit_learn
@pytest.mark.skipif(importlib.util.find_spec("zmq") is None, reason="hvdx[parameter-server] is not installed")
def test_parameter_server_digits() -> None:
    command = [str(EXAMPLES / "parameter_server_digits.py")]
    found = {}
    for mode, updates in (("", 440), ("--asynchronous", 880)):
        job = run_ranks(2, [*command, *mode.split()], limit=280, options=["--servers", "2"])
        assert job.code == 0, job.output
        found[mode] = accuracy(job.output)
        assert "strategy parameter_server\n" in job.output
        assert re.search(rf"2 parameter server\(s\) on \S+, {mode.strip('-') or 'synchronous'}", job.output)
        counted = re.findall(
            r"server \d: [\d,]+ bytes of parameters, (\d+) pushes, (\d+) updates, .* (\d+)", job.output
        )
        assert [(int(pushes), int(made)) for pushes, made, _ in counted] == [(880, updates)] * 2, "none lost or doubled"
        assert all(int(staleness) <= 4 for *_, staleness in counted)
    assert found[""] >= 0.97
    assert found["--asynchronous"] >= found[""] - 0.01


SMALL = ("--model", "MobileNetV2", "--image-size", "32", "--batch-size", "2", "--num-warmup-batches", "1",
         "--num-batches-per-iter", "2", "--num-iters", "2")  # fmt: skip


def test_synthetic_benchmark() -> None:
    output = run(2, "synthetic_benchmark.py", *SMALL, "--fp16-allreduce")
    assert "Number of CPUs: 2" in output or "Number of GPUs: 2" in output
    assert len(re.findall(r"Iter #\d: [\d.]+ img/sec per", output)) == 2
    one = re.search(r"Img/sec per .PU: ([\d.]+) \+-([\d.]+)", output)
    total = re.search(r"Total img/sec on 2 .PU\(s\): ([\d.]+) \+-([\d.]+)", output)
    assert one
    assert total
    assert float(total[1]) == pytest.approx(2 * float(one[1]), abs=0.2)
    assert float(one[1]) > 0


def test_synthetic_benchmark_alone() -> None:
    assert "Total img/sec on 1 " in run(1, "synthetic_benchmark.py", *SMALL)


def test_synthetic_benchmark_names_the_models_it_knows() -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "synthetic_benchmark.py"), "--model", "ResNet51"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, timeout=120, capture_output=True,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "no model 'ResNet51'" in ended.stderr
    assert "ResNet50V2" in ended.stderr
