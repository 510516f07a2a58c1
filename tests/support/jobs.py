"""Starting jobs of several ranks from a test, with a limit, and looking at what they left."""

from __future__ import annotations

import os
import subprocess
import sys
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
