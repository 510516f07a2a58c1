"""Starting jobs of several ranks from a test, with a limit, and looking at what they left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """How a job ended: exit code, what it printed (stdout and stderr as they came), and how long it took."""

    code: int
    output: str
    seconds: float


def run_ranks(
    ranks: int,
    command: Sequence[str],
    *,
    limit: float = 120,
    environ: dict[str, str] | None = None,
    options: Sequence[str] = (),
) -> Job:
    """Run a Python program (`command` without the interpreter) under hvdxrun and return how it ended.

    Raises:
        subprocess.TimeoutExpired: it did not end within `limit` seconds; its processes are gone all the same.
    """
    full = dict(os.environ, **(environ or {}))
    for name in [n for n in full if n.startswith(("OMPI_", "PMI_", "PMIX_", "PRTE_"))]:
        del full[name]
    full.pop("HVDX_TEST_NP", None)
    full["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), full.get("PYTHONPATH", "")]))
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdx.launch.hvdxrun", "-np", str(ranks), *options, sys.executable, *command],
        env=full,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    return Job(process.returncode, output, time.monotonic() - start)


def without_marks() -> dict[str, str]:
    """Return the environment without marks of a launcher and without options of hvdx; `tests` can be imported."""
    marks = ("OMPI_", "PMI", "PRTE_", "HOROVOD_", "HVDX_", "SLURM_", "DMLC_", "NCCL_", "TF_CONFIG")
    result = {name: value for name, value in os.environ.items() if not name.startswith(marks)}
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return result


def run_by_hand(members: Sequence[dict[str, str]], command: Sequence[str], *, limit: float = 120) -> list[Job]:
    """Run a Python program as plain processes without any launcher, one for each dictionary of variables.

    Raises:
        subprocess.TimeoutExpired: they did not all end within `limit` seconds; they are gone all the same.
    """
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        running = []
        for own in members:
            log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**without_marks(), "HVDX_TIMEOUT": "60", "TF_CPP_MIN_LOG_LEVEL": "3", **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
            running.append((process, log))
        jobs = []
        for process, log in running:
            code = process.wait(max(0.1, start + limit - time.monotonic()))
            log.seek(0)
            jobs.append(Job(code, log.read(), time.monotonic() - start))
        return jobs


def processes_with(text: str) -> list[int]:
    """Return the ids of running processes, other than this one, whose command line contains `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in line:
                found.append(int(entry.name))
    return found
