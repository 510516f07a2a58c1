"""Starting native_program.py under the launchers that the native communicators have to work with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.jobs import Job, without_marks

PROGRAM = str(Path(__file__).with_name("native_program.py"))
LIMIT = 150
"""Seconds in which a job must have ended; HVDX_TIMEOUT is far below."""
_NOISE = re.compile(
    r"oneDNN|cudart_stub|absl::InitializeLog|cuInit|cpu_feature_guard|To enable the following|NodeDef mentions|TF-TRT"
)


def environment(**variables: str) -> dict[str, str]:
    """Return an environment without marks of a launcher, with short limits."""
    result = without_marks()
    result["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    result |= {"HVDX_TIMEOUT": "6", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    return result | variables


def run(command: Sequence[str], **variables: str) -> Job:
    """Run a command to its end, in a session of its own, which is ended where the command does not end by itself."""
    start = time.monotonic()
    process = subprocess.Popen(
        command, env=environment(**variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return Job(process.returncode, output, time.monotonic() - start)


def hvdxrun(scene: str, ranks: int = 2, **variables: str) -> Job:
    """Play a scene under hvdxrun."""
    return run(
        [sys.executable, "-m", "hvdx.launch.hvdxrun", "-np", str(ranks), sys.executable, PROGRAM, scene], **variables
    )


def horovodrun(controller: str, scene: str, **variables: str) -> Job:
    """Play a scene under Horovod's own launcher, over "gloo" or "mpi"."""
    options = [f"--{controller}", "-np", "2"]
    if controller == "mpi":
        # Horovod 0.28.1 writes -bind-to, which Open MPI 5 does not take
        options.append("--binding-args=--bind-to none --map-by slot")
    launcher = str(Path(sys.executable).with_name("horovodrun"))
    return run([launcher, *options, sys.executable, PROGRAM, scene], **variables)


def complaints(job: Job) -> list[str]:
    """Return the lines of a job's output that no person expects of a program that goes well."""
    known = re.compile(r"rank \d+ (of|ends)|\[hvdxrun\] .* share \d+ cores")
    return [
        line for line in job.output.splitlines() if line.strip() and not known.search(line) and not _NOISE.search(line)
    ]


def left_over(job: Job) -> list[int]:
    """Return the ranks' processes that still run, some seconds after the job has ended."""
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", job.output)]
    end = time.monotonic() + 10
    while time.monotonic() < end and any(map(_runs, pids)):
        time.sleep(0.2)
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return PROGRAM in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
