"""A rank dies during an evaluation: the job ends at once, and the next start resumes from the last checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.comm.native_jobs import left_over
from tests.support.jobs import run_ranks

PROGRAM = str(Path(__file__).with_name("fault_program.py"))


@pytest.mark.parametrize("scene", ["rank 0 dies", "rank 1 dies", "rank 1 dies in its part"])
def test_a_rank_killed_during_evaluation(tmp_path: Path, scene: str) -> None:
    folder = tmp_path / "model"
    job = run_ranks(2, [PROGRAM, str(folder), scene], environ={"HVDX_TIMEOUT": "60"})
    assert job.code == 137, job.output
    assert re.search(rf"\[hvdxrun\].*{scene.split(' dies')[0]} .*SIGKILL", job.output), job.output
    assert job.seconds < 60
    assert left_over(job) == []
    again = run_ranks(2, [PROGRAM, str(folder), "whole"])
    assert again.code == 0, again.output
    for rank in range(2):
        line = next(line for line in again.output.splitlines() if f"rank {rank} began" in line)
        assert "began at step [4]" in line
        assert re.search(r"'global_step': (np\.int64\()?6\b", line)
    # A finished run that is started again trains and waits for nothing.
    third = run_ranks(2, [PROGRAM, str(folder), "whole"])
    assert third.code == 0, third.output
    assert third.output.count("began at step [], ended with None") == 2
