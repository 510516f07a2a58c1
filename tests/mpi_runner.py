"""Runs the test suite on several ranks: `python tests/mpi_runner.py --np 2 [--comm mpi] [paths] [-- pytest options]`.

Every rank runs pytest on the same files in the same order, with one import of TensorFlow per launch. Tests take part
that are marked `pytest.mark.np(...)` with this number of ranks. What rank 0 prints is shown; the other ranks' output
only when something failed. The last line is rank 0's closing line of pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5


def main() -> int:
    """Start the ranks and report."""
    argv = sys.argv[1:]
    extra = argv[argv.index("--") + 1 :] if "--" in argv else []
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--np", type=int, required=True)
    parser.add_argument(
        "--comm", default="shared_memory", help="communicator: shared_memory, mpi, horovod or tensorflow"
    )
    parser.add_argument("--launcher", default="", help="another launcher's command line instead of hvdxrun's")
    parser.add_argument("--limit", type=float, default=1500, help="seconds for the whole run")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", default=[])
    options = parser.parse_args(argv[: len(argv) - len(extra) - 1] if "--" in argv else argv)
    if options.worker:
        return worker(Path(options.worker), options.paths, extra)
    return launch(options, extra)


def launch(options: argparse.Namespace, extra: list[str]) -> int:
    """Start this file again on every rank and wait."""
    paths = options.paths or [str(ROOT / "tests")]
    with tempfile.TemporaryDirectory(prefix="hvdx-tests-") as folder:
        launcher = options.launcher.split() or [sys.executable, "-m", "hvdx.launch.hvdxrun", "-np", str(options.np)]
        command = [
            *launcher,
            sys.executable,
            str(Path(__file__).resolve()),
            "--np",
            str(options.np),
            "--worker",
            folder,
        ]
        environ = dict(os.environ, HVDX_TEST_NP=str(options.np), HVDX_COMM=options.comm)
        environ.setdefault("HVDX_TIMEOUT", "60")
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH", "")]))
        try:
            code = subprocess.run([*command, *paths, "--", *extra], env=environ, timeout=options.limit).returncode
        except subprocess.TimeoutExpired:
            print(f"the run did not end within {options.limit:g} s", flush=True)
            code = 124
        logs = [Path(folder, f"rank.{rank}") for rank in range(options.np)]
        shown = sorted(logs, key=lambda log: (_failed(log), log.name == "rank.0")) if code else logs[:1]
        for log in shown:
            if log.exists():
                print(f"--- {options.comm}, {options.np} ranks: {log.name}", flush=True)
                print(log.read_text(errors="replace").rstrip(), flush=True)
    return 1 if code else 0


def _failed(log: Path) -> bool:
    """Return whether this rank's pytest failed, or never came to its end; such a log is shown last."""
    code = log.with_suffix(log.suffix + ".code")
    return not code.exists() or code.read_text() != "0"


def worker(folder: Path, paths: list[str], extra: list[str]) -> int:
    """Run pytest on this rank, with its output in a file."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK")
    rank = next((os.environ[name] for name in names if name in os.environ), "0")
    log = os.open(folder / f"rank.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import pytest

    code = int(pytest.main(["-p", "no:cacheprovider", *paths, *extra]))
    sys.stdout.flush()
    if code == NO_TESTS:
        print(f"no test is marked for {os.environ['HVDX_TEST_NP']} ranks")
        code = 0
    (folder / f"rank.{rank}.code").write_text(str(code))
    return code


if __name__ == "__main__":
    sys.exit(main())
