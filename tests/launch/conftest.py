"""Starting hvdxrun in a process of its own, and making sure that nothing of it is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import hvdx.launch

ROOT = str(Path(hvdx.launch.__file__).parents[2])
HVDXRUN = [sys.executable, "-m", "hvdx.launch.hvdxrun"]
_MADE_BY_MAKE = Path(__file__).resolve().parents[2] / ".venv-mpich" / "bin" / "python"
MPICH_PYTHON = os.environ.get("HVDX_TEST_MPICH_PYTHON") or (str(_MADE_BY_MAKE) if _MADE_BY_MAKE.exists() else None)


@dataclass
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.splitlines())


def _heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Launches:
    """Starts hvdxrun; every process of a start carries a mark in its environment, by which left-overs are found."""

    folder: Path
    python: str
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def environment(self, **variables: str) -> dict[str, str]:
        clean = {
            k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_", "OMP_NUM", "TF_NUM"))
        }
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        return clean | {"HVDX_TEST_MARK": self.mark, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | variables

    def program(self, source: str) -> str:
        path = self.folder / "program.py"
        path.write_text(source)
        return str(path)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*HVDXRUN, *arguments], env=self.environment(**variables), cwd=self.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_heed_interrupts,
        )  # fmt: skip

    def __call__(self, *arguments: str, limit: float = 60.0, **variables: str) -> Result:
        began = time.monotonic()
        process = self.start(*arguments, **variables)
        try:
            out, err = process.communicate(timeout=limit)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        return Result(process.returncode, out, err, time.monotonic() - began)

    def run(self, source: str, *options: str, np: int = 2, arguments: tuple[str, ...] = (), **variables: str) -> Result:
        """Run a program's source on `np` ranks of the environment under test."""
        return self("-np", str(np), *options, self.python, self.program(source), *arguments, **variables)

    def left_over(self) -> list[int]:
        """Return the processes that carry the mark."""
        needle, found = f"HVDX_TEST_MARK={self.mark}".encode(), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                if needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def wait_until_gone(self, limit: float) -> list[int]:
        end = time.monotonic() + limit
        while (found := self.left_over()) and time.monotonic() < end:
            time.sleep(0.05)
        return found


def _launches(folder: Path, python: str) -> Iterator[Launches]:
    launches = Launches(folder, python)
    yield launches
    left = launches.wait_until_gone(8.0)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left over: {left}"


@pytest.fixture
def hvdxrun(tmp_path: Path) -> Iterator[Launches]:
    """hvdxrun with this environment's own MPI."""
    yield from _launches(tmp_path, sys.executable)


@pytest.fixture(params=["own", "mpich"])
def any_mpi(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launches]:
    """hvdxrun with this environment's MPI, and again with MPICH's."""
    if request.param == "mpich" and not MPICH_PYTHON:
        pytest.skip("HVDX_TEST_MPICH_PYTHON names no Python with mpi4py and the mpich wheel")
    yield from _launches(tmp_path, sys.executable if request.param == "own" else str(MPICH_PYTHON))


@pytest.fixture
def fake_mpirun(tmp_path: Path) -> Callable[[str], str]:
    """Make an mpirun that only prints a version; returns its folder."""

    def make(version: str) -> str:
        folder = tmp_path / "fake"
        folder.mkdir(exist_ok=True)
        # Only what the shell itself can do: the test may leave nothing else on PATH.
        lines = "".join(f"echo '{line}'\n" for line in version.splitlines())
        (folder / "mpirun").write_text(f"#!/bin/sh\n{lines}")
        (folder / "mpirun").chmod(0o755)
        return str(folder)

    return make
