"""The script behind HVDX_ALLREDUCE=auto: how times become thresholds, and a short run on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import measure_algorithms as script
from hvdx.comm.algorithms import ALGORITHMS, measured
from tests.support.jobs import run_ranks


def test_thresholds_lie_between_sizes_and_small_advantages_do_not_count() -> None:
    times = {
        4: {"mpi": 10.0, "ring": 30.0, "tree": 9.8},
        16: {"mpi": 10.0, "ring": 30.0, "tree": 8.0},
        64: {"mpi": 8.0, "ring": 30.0, "tree": 8.1},
        256: {"mpi": 20.0, "ring": 12.0, "tree": 30.0},
        1024: {"mpi": 20.0, "ring": 20.5, "tree": 30.0},
    }
    seconds = {size: {way: [time] * 3 for way, time in of.items()} for size, of in times.items()}
    assert script.thresholds(seconds) == {"0": "mpi", "8": "tree", "128": "ring"}
    assert script.thresholds({4: {"mpi": [2.0], "ring": [1.0]}}) == {"0": "ring"}


def test_times_that_overlap_tell_nothing() -> None:
    overlapping = {"mpi": [10.0, 2.0, 11.0, 3.0, 10.0], "ring": [2.0, 9.0, 2.0, 9.0, 8.0]}
    assert script.thresholds({4: overlapping}) == {"0": "mpi"}
    assert script.thresholds({4: {**overlapping, "ring": [1.0, 1.5, 1.0, 1.5, 1.0]}}) == {"0": "ring"}


def test_the_table_marks_the_fastest() -> None:
    seconds = {4096: {way: [(1 + number) * 1e-6] * 3 for number, way in enumerate(script.WAYS)}}
    lines = script.markdown("here", seconds).splitlines()
    assert lines[-1].startswith("| 4 KiB | **1 [1, 1]** | 2 [2, 2] |")
    assert "mpi | ring | recursive_doubling" in lines[2]


def test_a_short_run(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.measure_algorithms", "--even-if-busy", "--rounds", "1", "--largest", "64"]
    job = run_ranks(2, [*command, "--output", str(tmp_path)])
    assert job.code == 0, job.output
    [found] = tmp_path.glob("algorithms-*-2.json")
    row = json.loads(found.read_text())["row"]
    begins, names = measured.to_thresholds(row["from bytes"])
    assert begins[0] == 0
    assert set(names) <= {"mpi", *ALGORITHMS}
    assert row["ranks per host"] == [2]
    assert found.with_suffix(".md").read_text().count("\n| ") == 4  # the head and 4, 16, 64 bytes
    svg = found.with_suffix(".svg").read_text()
    assert all(f">{way}</text>" in svg for way in script.WAYS)
