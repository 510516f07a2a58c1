"""The benchmark of all-reduce: what it makes of times, and a small run against Horovod."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.jobs import ROOT

SCRIPT = ROOT / "benchmarks" / "allreduce.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("benchmarks_allreduce", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ratios_are_paired_and_taken_to_the_better_of_horovod(benchmark: ModuleType) -> None:
    times = {
        benchmark.HVDX: [[0.002, 0.002, 0.9], [0.004, 0.004, 0.004]],
        "Horovod, grouped": [[0.004], [0.008]],
        "Horovod, one by one": [[0.02], [0.04]],
        benchmark.RAW: [[0.001], [0.001]],
    }
    found = benchmark.summary("small CNN", [(2, 3), (), (4,)], times)
    assert found["bytes"] == 4 * 11
    assert found["best of Horovod"] == "Horovod, grouped"
    assert found["ratio"] == [0.5, 0.5, 0.5]
    assert found["met"]
    assert found["noisy"], "hvdx's rounds differ by a factor of two"
    assert found["milliseconds"][benchmark.HVDX] == pytest.approx([2.5, 3, 3.5])
    assert not benchmark.summary("small CNN", [(1,)], {**times, benchmark.HVDX: [[0.003], [0.006]]})["met"]


def test_the_report_says_what_was_met_and_whether_to_trust_it(benchmark: ModuleType) -> None:
    facts = {
        "ranks": 2, "date": "today", "processor": "P", "cores": 2, "load before": 0.1, "mpi": "M", "python": "3",
        "versions": {"hvdx": "1"}, "horovod settings": {},
    }  # fmt: skip
    times = {name: [[0.001], [0.001]] for name in (benchmark.HVDX, *benchmark.HOROVOD, benchmark.RAW)}
    text = benchmark.markdown(facts, [benchmark.summary("ResNet-50", [(2,)], times)])
    assert "hvdx takes 1.00 [1.00, 1.00] of the time" in text
    assert "Accepted is 1 or less: met" in text
    assert "noisy" not in text
    assert "NOT met" in benchmark.markdown(facts, [benchmark.summary("small CNN", [(2,)], times)])
    assert "The machine was noisy" in benchmark.markdown({**facts, "load before": 3.0}, [])


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not built in this environment")
def test_a_small_run(tmp_path: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "PRTE_"))}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "2", "--sets", "small CNN", "--output", str(tmp_path)],
        env=clean, text=True, timeout=200, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    written = json.loads((tmp_path / "allreduce.json").read_text())
    [only] = written["sets"]
    assert only["tensors"] == 8
    assert 150_000 < only["bytes"] < 250_000
    assert all(len(rounds) == 2 for rounds in only["all milliseconds"].values())
    assert written["machine"]["versions"]["horovod"] == "0.28.1"
    assert "small CNN: 8 tensors" in (tmp_path / "allreduce.md").read_text()
    assert "hvdx takes" in ended.stdout
