"""Starting servers and workers of `parameter_server_program.py` from a test, with a limit, and ending what is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("parameter_server_program.py")


@dataclass
class Job:
    """Servers and workers that run, and where they write."""

    servers: list[subprocess.Popen[str]]
    workers: list[subprocess.Popen[str]]
    folder: Path

    def wait(self, processes: Sequence[subprocess.Popen[str]], limit: float) -> list[int]:
        """Return how these processes ended."""
        return [process.wait(limit) for process in processes]

    def output(self, process: subprocess.Popen[str]) -> str:
        """Return what a process printed."""
        return Path(process.args[-1]).read_text(errors="replace")  # type: ignore[index, arg-type]

    def everything(self) -> str:
        """Return what all processes printed."""
        return "\n".join(self.output(process) for process in [*self.workers, *self.servers])

    def outcomes(self, worker: int) -> dict[str, Any]:
        """Return what each scene of a worker came to."""
        path = self.folder / f"worker-{worker}.json"
        return json.loads(path.read_text()) if path.exists() else {}


@contextlib.contextmanager
def job(folder: Path, scenes: Sequence[str], *, servers: int = 2, workers: int = 2, **environ: str) -> Iterator[Job]:
    """Start servers, and workers that play these scenes; end them all afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "HVDX_TIMEOUT": "60", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **environ}
    env.pop("HVDX_TEST_NP", None)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))

    def start(role: str, index: int, *rest: str) -> subprocess.Popen[str]:
        log = folder / f"{role}-{index}.log"
        with log.open("w") as file:
            command = [sys.executable, str(PROGRAM), role, str(index), str(workers), str(servers), str(folder), *rest]
            return subprocess.Popen(
                [*command, str(log)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )

    running = Job([], [], folder)
    try:
        running.servers += [start("server", index) for index in range(servers)]
        running.workers += [start("worker", index, ",".join(scenes)) for index in range(workers)]
        yield running
    finally:
        for process in [*running.workers, *running.servers]:
            if process.poll() is None:
                process.kill()
            process.wait(10)
