"""scripts/run_tests.py: reading closing lines, judging runs, and carrying on after a failure, with real processes."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_tests.py"


def load() -> ModuleType:
    specification = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["run_tests"] = module
    specification.loader.exec_module(module)
    return module


run_tests = load()


def python_run(name: str, code: str) -> object:
    return run_tests.Run(name, (sys.executable, "-c", code))


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("=== 3 passed in 0.10s ===", {"passed": 3}),
        ("==== 1 failed, 2 passed, 1 skipped, 3 warnings in 61.20s (0:01:01) ====",
         {"failed": 1, "passed": 2, "skipped": 1, "warnings": 3}),
        ("\x1b[32m=== \x1b[1m7 passed\x1b[0m, 2 errors in 1.00s ===", {"passed": 7, "errors": 2}),
        ("no tests ran in 0.01s", {}),
        ("2 xfailed, 1 xpassed in 4s", {"xfailed": 2, "xpassed": 1}),
    ],
)  # fmt: skip
def test_closing_line_of_pytest(line: str, counts: dict[str, int]) -> None:
    assert run_tests.closing_counts(f"noise 9 passed\n{line}\nafterwards\n") == counts


def test_no_closing_line() -> None:
    assert run_tests.closing_counts("9 passed, they said\n") is None


@pytest.mark.parametrize(
    ("code", "text", "passed", "failed", "note"),
    [
        (0, "== 2 passed in 1.0s ==", 2, 0, ""),
        (1, "== 1 failed, 1 passed in 1.0s ==", 1, 1, ""),
        (1, "== 2 errors in 1.0s ==", 0, 2, ""),
        (1, "== 2 passed in 1.0s ==", 2, 1, "exit code 1"),
        (-9, "", 0, 1, "exit code -9"),
        (0, "nothing", 0, 1, "ran no test"),
        (5, "== no tests ran in 0.0s ==", 0, 1, "exit code 5"),
        (0, "== 3 skipped in 0.0s ==", 0, 1, "ran no test"),
        (None, "== 3 passed in 0.0s ==", 3, 1, "stopped at its time limit"),
    ],
)
def test_a_run_is_judged_by_code_and_counts(code: int | None, text: str, passed: int, failed: int, note: str) -> None:
    outcome = run_tests.judge(run_tests.Run("x", ("x",)), code, text, 1.0)
    assert (outcome.passed, outcome.failed, outcome.note) == (passed, failed, note)


def test_lint_counts_no_test_but_can_fail() -> None:
    lint = run_tests.Run("lint", ("x",), counts_tests=False)
    assert run_tests.judge(lint, 0, "fine", 1.0).failed == 0
    assert run_tests.judge(lint, 2, "1 passed in 1.0s", 1.0) == run_tests.Outcome("lint", 0, 1, 0, 1.0, "exit code 2")


def test_all_runs_are_attempted_and_the_last_line_sums(tmp_path: Path) -> None:
    said: list[str] = []
    plan = [
        python_run("first", "print('boom'); print('== 1 failed, 2 passed in 1.0s =='); raise SystemExit(1)"),
        run_tests.Run("absent", (str(tmp_path / "no-such-program"),)),
        python_run("last", "print('== 4 passed, 1 skipped in 1.0s ==')"),
    ]
    assert run_tests.run_all(plan, tmp_path / "logs", say=said.append) == 1
    assert said[-1] == "6 passed, 2 failed, 1 skipped"
    assert "boom" in "\n".join(said)
    assert "== 4 passed, 1 skipped in 1.0s ==" not in said, "what a good run prints stays in its log"
    assert "4 passed" in (tmp_path / "logs" / "last.log").read_text()


def test_lanes_run_at_the_same_time_and_report_in_order(tmp_path: Path) -> None:
    """Each of two runs waits for a file that the other one makes."""
    wait = (
        "import pathlib, sys, time; pathlib.Path({mine!r}).touch()\n"
        "while not pathlib.Path({other!r}).exists(): time.sleep(0.05)\n"
        "time.sleep({pause}); print('== 1 passed in 1.0s ==')"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    plan = [
        python_run("slow", wait.format(mine=a, other=b, pause=1)),
        python_run("quick", wait.format(mine=b, other=a, pause=0)),
    ]
    said: list[str] = []
    assert run_tests.run_all(plan, tmp_path / "logs", run_limit=30, say=said.append, lanes=2) == 0
    assert said[-1] == "2 passed, 0 failed, 0 skipped"
    rows = [line.split()[0] for line in "\n".join(said).splitlines() if line.startswith(("slow", "quick"))]
    assert rows == ["slow", "quick"]


def test_good_runs_give_exit_code_0(tmp_path: Path) -> None:
    said: list[str] = []
    assert run_tests.run_all([python_run("one", "print('1 passed in 1s')")], tmp_path, say=said.append) == 0
    assert said[-1] == "1 passed, 0 failed, 0 skipped"


def test_a_run_over_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    child = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    started = time.monotonic()
    code = run_tests.run_all([python_run("slow", child)], tmp_path, run_limit=2.0, say=lambda text: None)
    assert code == 1
    assert time.monotonic() - started < 30
    pid = int((tmp_path / "slow.log").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1]:
        assert time.monotonic() < deadline, f"the child {pid} is still there"
        time.sleep(0.1)


def test_runs_after_the_time_for_all_is_used_up_count_as_failed(tmp_path: Path) -> None:
    said: list[str] = []
    plan = [python_run("late", "print('1 passed in 1s')")]
    assert run_tests.run_all(plan, tmp_path, plan_limit=0.0, say=said.append) == 1
    assert said[-1] == "0 passed, 1 failed, 0 skipped"


def test_the_plan_covers_both_tensorflows_both_mpis_and_four_communicators() -> None:
    commands = [" ".join(run.command) for run in run_tests.full_plan()]
    starts = [command.partition(" tests/comm")[0] for command in commands]
    default = "shared_memory"
    for ranks, comm in ((2, default), (3, default), (4, default), (2, "mpi"), (2, "horovod"), (2, "tensorflow")):
        assert f".venv/bin/python tests/mpi_runner.py --np {ranks} --comm {comm}" in starts
    for comm in (default, "horovod", "tensorflow"):
        assert f".venv-tf215/bin/python tests/mpi_runner.py --np 2 --comm {comm}" in starts
    assert f".venv-mpich/bin/python tests/mpi_runner.py --np 2 --comm {default}" in starts
    assert f".venv/bin/python -m pytest tests {' '.join(run_tests.SIDE_BY_SIDE)}" in commands
    paths = {word.removeprefix("--ignore=") for command in commands for word in command.split() if "tests/" in word}
    root = Path(run_tests.__file__).resolve().parents[1]
    assert all((root / path).exists() for path in paths)
    assert len({run_tests.log_name(run) for run in run_tests.full_plan()}) == len(commands)


def test_a_name_that_selects_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    before = os.getcwd()
    try:
        with pytest.raises(SystemExit):
            run_tests.main(["--only", "no such run"])
    finally:
        os.chdir(before)
    assert "no run's name has 'no such run'" in capsys.readouterr().err
