"""Runs the whole test suite: each environment plain, then under MPI; prints a table and one closing line.

Every run is attempted, whatever the ones before it did. What a run prints goes to a log, and to the screen when it
fails. Standard library only, so that any Python can drive it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Above the limit that the runner of ranks gives itself, so that its own words come first.
RUN_LIMIT_SECONDS = 3000.0
# Below the 90 minutes that CI gives, environments and Horovod's build included, so that the table is always printed.
PLAN_LIMIT_SECONDS = 4800.0
# Most of what tests without ranks do is to start jobs and wait for them; a file stays together, with what it shares.
SIDE_BY_SIDE = ("--numprocesses", "2", "--dist", "loadfile", "--durations", "25")
# Runs at the same time. More pay off on more cores than two: a run keeps about two busy.
LANES = 1


@dataclass(frozen=True)
class Run:
    """One command of the suite; `counts_tests` is False for a check such as lint, which has no closing line."""

    name: str
    command: tuple[str, ...]
    counts_tests: bool = True


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    name: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    note: str = ""


def plain(environment: str, *left_out: str) -> Run:
    """Return the run of the suite without ranks, without the folders or files `left_out`; two files at a time."""
    ignored = [f"--ignore={path}" for path in left_out]
    python = f"{environment}/bin/python"
    return Run(f"{environment} plain", (python, "-m", "pytest", "tests", *SIDE_BY_SIDE, *ignored))


def under_mpi(environment: str, ranks: int, comm: str, *paths: str) -> Run:
    """Return the run of the files that ask for several ranks; of those below `paths`, where any are given."""
    python = f"{environment}/bin/python"
    return Run(
        f"{environment} {ranks} ranks, {comm}",
        (python, "tests/mpi_runner.py", "--np", str(ranks), "--comm", comm, *paths),
    )


# What does not depend on the version of TensorFlow runs in .venv only, and what does not depend on how bytes move with
# one communicator only; else the suite would take twice as long and show nothing more.
WITHOUT_TENSORFLOW = (
    "tests/launch",
    "tests/scripts",
    "tests/benchmarks",
    "tests/planning",
    "tests/comm/algorithms",
    "tests/comm/test_faults.py",
    "tests/comm/test_shared_memory_jobs.py",
    "tests/distribute/test_cluster.py",
    "tests/distribute/test_meeting.py",
    "tests/distribute/test_parameter_server_placement.py",
    "tests/distribute/test_parameter_server.py",  # without the strategy: the servers' own part of it
)
MOVES_BYTES = (
    "tests/comm",
    "tests/ops",
    "tests/data",
    "tests/training/test_reducer.py",
    "tests/training/test_overlap.py",
    "tests/training/test_tape.py",
    "tests/training/test_v1.py",
    "tests/training/test_several_models.py",
)
YARDSTICK = "tests/training/test_yardstick.py"  # several ranks against one process
ESTIMATOR = "tests/estimator"  # by the default and by Horovod, which its users know, on both TensorFlows
DEFAULT = "shared_memory"  # what users get under MPI: every test that asks for ranks


def full_plan() -> list[Run]:
    """Return every run of `make test`: lint first, then so that the longest does not begin last."""
    return [
        Run("lint", ("make", "--no-print-directory", "--keep-going", "lint"), counts_tests=False),
        plain(".venv"),
        plain(".venv-tf215", *WITHOUT_TENSORFLOW),
        *(under_mpi(".venv", ranks, DEFAULT) for ranks in (2, 3, 4)),
        under_mpi(".venv", 2, "mpi", *MOVES_BYTES),
        under_mpi(".venv", 2, "horovod", *MOVES_BYTES, YARDSTICK, ESTIMATOR),
        under_mpi(".venv", 2, "tensorflow", *MOVES_BYTES, YARDSTICK),
        under_mpi(".venv-tf215", 2, DEFAULT),
        under_mpi(".venv-tf215", 2, "horovod", *MOVES_BYTES, ESTIMATOR),
        under_mpi(".venv-tf215", 2, "tensorflow", *MOVES_BYTES),
        under_mpi(".venv-mpich", 2, DEFAULT, *MOVES_BYTES),
    ]


def closing_counts(text: str) -> dict[str, int] | None:
    """Return the counts of pytest's last closing line (`== 3 passed, 1 skipped in 2.1s ==`), or None without one."""
    for line in reversed(text.splitlines()):
        bare = re.sub(r"\x1b\[[0-9;]*m", "", line).strip().strip("=").strip()
        found = re.fullmatch(r"((?:\d+ [a-z]+, )*\d+ [a-z]+|no tests ran) in [0-9.]+s(?: \([0-9:]+\))?", bare)
        if found:
            return {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", found.group(1))}
    return None


def judge(run: Run, code: int | None, text: str, seconds: float) -> Outcome:
    """Turn exit code (None: time limit) and output of one run into an outcome; a failed run counts at least one."""
    counts = (closing_counts(text) if run.counts_tests else None) or {}
    passed = counts.get("passed", 0) + counts.get("xpassed", 0)
    failed = counts.get("failed", 0) + sum(counts.get(word, 0) for word in ("error", "errors"))
    skipped = counts.get("skipped", 0) + counts.get("xfailed", 0)
    note = ""
    if code is None:
        note = "stopped at its time limit"
    elif code != 0 and not failed:
        note = f"exit code {code}"
    elif run.counts_tests and passed + failed == 0:
        note = "ran no test"
    return Outcome(run.name, passed, max(failed, 1 if note else 0), skipped, seconds, note)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and those it started, which share its process group."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


_running: set[subprocess.Popen[bytes]] = set()


def end_all() -> None:
    """End the runs of all lanes."""
    for process in list(_running):
        end_group(process)


def execute(run: Run, log: Path, limit: float) -> Outcome:
    """Run the command with its output in the log, and judge it."""
    started = time.monotonic()
    code: int | None = None
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                run.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            output.write(f"cannot start {run.command[0]}: {error}\n".encode())
            output.flush()
            return judge(run, 127, "", time.monotonic() - started)
        _running.add(process)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_group(process)
            _running.discard(process)
    return judge(run, code, log.read_text(errors="replace"), time.monotonic() - started)


def log_name(run: Run) -> str:
    """Return a file name made from the run's name."""
    return re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-") + ".log"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the summary, one line a run."""
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [f"{'run':<{width}}  passed  failed  skipped  seconds"]
    for o in outcomes:
        line = f"{o.name:<{width}}  {o.passed:6d}  {o.failed:6d}  {o.skipped:7d}  {o.seconds:7.0f}  {o.note}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def closing_line(outcomes: Sequence[Outcome]) -> str:
    """Return the sums in the plain form that ends the output."""
    passed, failed, skipped = (sum(getattr(o, field) for o in outcomes) for field in ("passed", "failed", "skipped"))
    return f"{passed} passed, {failed} failed, {skipped} skipped"


def run_all(
    plan: Sequence[Run],
    logs: Path,
    run_limit: float = RUN_LIMIT_SECONDS,
    plan_limit: float = PLAN_LIMIT_SECONDS,
    say: Callable[[str], None] = print,
    lanes: int = 1,
) -> int:
    """Carry out the plan, `lanes` runs at a time; return 0 when nothing failed and at least one test passed."""
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + plan_limit

    def carry_out(run: Run) -> Outcome:
        log = logs / log_name(run)
        left = deadline - time.monotonic()
        if left <= 0:
            return Outcome(run.name, 0, 1, 0, 0.0, "not run: the time for all runs is used up")
        outcome = execute(run, log, min(run_limit, left))
        report = [f"--- {run.name}: {' '.join(run.command)}"]
        if outcome.failed:
            report.append(log.read_text(errors="replace").rstrip("\n"))
        report.append(
            f"    {outcome.passed} passed, {outcome.failed} failed in {outcome.seconds:.0f} s  {outcome.note}".rstrip()
        )
        say("\n".join(report))
        return outcome

    with ThreadPoolExecutor(lanes) as pool:
        try:
            outcomes = list(pool.map(carry_out, plan))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise
    say("\n" + table(outcomes))
    say(f"the output of each run is in {logs}")
    say(closing_line(outcomes))
    return 0 if not any(o.failed for o in outcomes) and any(o.passed for o in outcomes) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description="Run the whole test suite, plain and under MPI.")
    parser.add_argument("--only", default="", help="only the runs whose name has this text, for example 'tf215 plain'")
    parser.add_argument("--logs", type=Path, default=Path("build/test-logs"), help="folder for the output of each run")
    parser.add_argument("--lanes", type=int, default=LANES, help=f"runs at the same time (default {LANES})")
    parser.add_argument("--list", action="store_true", help="print the runs and do nothing")
    options = parser.parse_args(arguments)
    os.chdir(Path(__file__).resolve().parent.parent)
    plan = [run for run in full_plan() if options.only in run.name]
    if not plan:
        parser.error(f"no run's name has {options.only!r}; see --list")
    if options.list:
        for run in plan:
            print(f"{run.name}: {' '.join(run.command)}")
        return 0
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return run_all(plan, options.logs, lanes=max(1, options.lanes))


if __name__ == "__main__":
    sys.exit(main())
