"""The program in the README runs, as it stands there, on two ranks and on one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import installed_kerases
from tests.support.jobs import ROOT, run_ranks


@pytest.fixture
def program(tmp_path: Path) -> Path:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- example -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    assert len(found.group(1).strip().splitlines()) <= 13
    path = tmp_path / "train.py"
    path.write_text(found.group(1))
    return path


@pytest.mark.skipif("keras3" not in installed_kerases(), reason="the README's program imports Keras 3")
def test_the_readme_program_on_two_ranks_learns(program: Path) -> None:
    job = run_ranks(2, [str(program)], limit=200)
    assert job.code == 0, job.output
    accuracies = [float(value) for value in re.findall(r"\[0\].*accuracy: ([0-9.]+)", job.output)]
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.85
    assert "1,797 samples over 2 ranks" in job.output


@pytest.mark.skipif("keras3" not in installed_kerases(), reason="the README's program imports Keras 3")
def test_the_readme_program_runs_without_a_launcher(program: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "57/57" in done.stdout
