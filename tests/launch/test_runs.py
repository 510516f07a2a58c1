"""Real starts with small programs, on this environment's MPI and on MPICH: output, exit codes, deaths, signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from hvdx.launch import leftovers
from tests.launch.conftest import Launches

GONE_WITHIN = 10.0

HELLO = """
import os, sys
from mpi4py import MPI
c = MPI.COMM_WORLD
names = "HVDX_EXPECTED_SIZE HVDX_START_TIMEOUT OMP_NUM_THREADS TF_NUM_INTEROP_THREADS HVDX_THREADS_PER_RANK MINE"
print("sum", c.allreduce(c.rank + 1), *(os.environ.get(name, "-") for name in names.split()))
print("error of", c.rank, file=sys.stderr)
"""

# Rank 1 ends in the given way while rank 0 waits for it for ever; hvdx's own protocol for an exception is to print
# it and to leave by os._exit(1).
DEATH = """
import os, signal, sys, traceback
from mpi4py import MPI
c = MPI.COMM_WORLD
c.Barrier()
if c.rank == 1:
    if sys.argv[1] == "code":
        os._exit(3)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "abort":
        c.Abort(5)
    try:
        raise ValueError("boom in rank 1")
    except ValueError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
c.recv(source=1)
"""

WAIT = """
import signal, sys, time
from mpi4py import MPI
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
MPI.COMM_WORLD.Barrier()
print("up", flush=True)
time.sleep(120)
"""


def test_two_ranks_with_tags_and_threads(any_mpi: Launches) -> None:
    result = any_mpi.run(HELLO, "--threads-per-rank", "3", "--start-timeout", "77", "-x", "MINE=yes")
    assert result.code == 0, result.err
    assert result.lines == ["[0] sum 3 2 77 3 3 3 yes", "[1] sum 3 2 77 3 3 3 yes"]
    assert sorted(re.findall(r"^\[\d\] error of \d$", result.err, re.MULTILINE)) == ["[0] error of 0", "[1] error of 1"]
    notes = [line for line in result.err.splitlines() if "[hvdxrun]" in line]
    assert len(notes) == 1
    assert re.fullmatch(r"\[hvdxrun\] \S+: 2 ranks share \d+ cores?: 3 threads each as asked", notes[0])


def test_nothing_but_the_ranks_lines_is_shown(any_mpi: Launches) -> None:
    result = any_mpi.run("from mpi4py import MPI\nprint(MPI.COMM_WORLD.size)")
    assert result.lines == ["[0] 2", "[1] 2"]
    assert len(result.err.splitlines()) == 1, result.err


def test_more_ranks_than_cores(any_mpi: Launches) -> None:
    ranks = len(os.sched_getaffinity(0)) + 2
    result = any_mpi.run(HELLO, np=ranks)
    assert result.code == 0, result.err
    assert all(f" sum {ranks * (ranks + 1) // 2} {ranks} - 1 2 1 -" in line for line in result.lines)


def test_what_the_user_set_wins(hvdxrun: Launches) -> None:
    result = hvdxrun.run(HELLO, OMP_NUM_THREADS="5")
    assert result.lines[0].split()[5] == "5"
    assert "kept as you set them: OMP_NUM_THREADS=5" in result.err


def test_any_program_can_be_started_and_the_hosts_name_is_localhost(hvdxrun: Launches) -> None:
    result = hvdxrun("-np", "3", "-H", "localhost", "sh", "-c", "echo $HVDX_EXPECTED_SIZE")
    assert (result.code, result.lines) == (0, ["[0] 3", "[1] 3", "[2] 3"])


def test_ranks_run_as_root_where_the_user_is_root(hvdxrun: Launches) -> None:
    result = hvdxrun("-np", "2", "id", "-u")
    assert (result.code, result.lines) == (0, [f"[0] {os.geteuid()}", f"[1] {os.geteuid()}"])


def test_all_of_a_long_output_arrives_in_whole_lines(any_mpi: Launches) -> None:
    lines, width = 5000, 150
    source = f"for i in range({lines}): print(i, 'x' * (i % {width}))\nprint('last', end='')"
    result = any_mpi.run(source, np=3)
    for rank in range(3):
        mine = [line for line in result.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [*(f"[{rank}] {i} {'x' * (i % width)}" for i in range(lines)), f"[{rank}] last"]
    assert len(result.out.splitlines()) == 3 * (lines + 1)


def test_output_files(any_mpi: Launches) -> None:
    result = any_mpi.run(HELLO, "--output-filename", "logs")
    assert result.code == 0
    for rank in range(2):
        folder = any_mpi.folder / "logs" / f"rank.{rank}"
        assert (folder / "stdout").read_text().startswith("sum 3 2 ")
        assert (folder / "stderr").read_text() == f"error of {rank}\n"
    assert len(result.lines) == 2


def test_a_rank_that_reads_its_input_finds_it_empty_and_goes_on(any_mpi: Launches) -> None:
    # Open MPI 5 would let it wait for ever.
    result = any_mpi.run("import sys\nprint(repr(sys.stdin.read()))")
    assert (result.code, result.lines) == (0, ["[0] ''", "[1] ''"])


def test_sys_exit_of_one_rank(any_mpi: Launches) -> None:
    source = "import sys\nfrom mpi4py import MPI\nr = MPI.COMM_WORLD.rank\nMPI.Finalize()\nsys.exit(3 * (r == 1))"
    result = any_mpi.run(source)
    assert result.code == 3
    assert re.fullmatch(r"\[hvdxrun\] rank 1 on \S+ exited with code 3; the others were ended", _last(result.err))


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("code", 3, "exited with code 3"),
        ("kill", 137, r"was ended by signal 9 \(SIGKILL\)"),
        ("exception", 1, "exited with code 1"),
    ],
)
def test_death_of_a_rank_ends_the_others_and_is_told_last(any_mpi: Launches, how: str, code: int, words: str) -> None:
    began = time.time()
    result = any_mpi.run(DEATH, arguments=(how,))
    assert result.code == code
    assert re.fullmatch(rf"\[hvdxrun\] rank 1 on \S+ {words}; the others were ended", _last(result.err))
    assert "------" not in result.err
    assert "BAD TERMINATION" not in result.err + result.out
    if how == "exception":
        assert result.err.splitlines()[-2] == "[1] ValueError: boom in rank 1"
    assert any_mpi.wait_until_gone(1.0) == []
    assert result.seconds < GONE_WITHIN
    assert _shared_memory_since(began) == []


def test_abort_gives_its_code(any_mpi: Launches) -> None:
    result = any_mpi.run(DEATH, arguments=("abort",))
    assert result.code == 5
    assert result.seconds < GONE_WITHIN


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", ["willing", "stubborn"])
def test_a_signal_ends_everything(any_mpi: Launches, number: signal.Signals, how: str) -> None:
    process = _started(any_mpi, how)
    process.send_signal(number)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert f"got {number.name}: ending all ranks" in err
    assert any_mpi.wait_until_gone(3.0) == []
    assert time.monotonic() - began < GONE_WITHIN + 3.0


def test_killing_hvdxrun_itself_leaves_no_rank(any_mpi: Launches) -> None:
    process = _started(any_mpi, "willing")
    process.kill()
    process.communicate(timeout=30)
    assert any_mpi.wait_until_gone(8.0) == []


def test_what_a_dead_rank_had_started_is_ended(hvdxrun: Launches) -> None:
    source = "import os, subprocess\nsubprocess.Popen(['sleep', '100'])\nos._exit(4)"
    assert hvdxrun.run(source, np=1).code == 4
    assert hvdxrun.wait_until_gone(3.0) == []


def test_dry_run_starts_nothing_and_its_command_works(hvdxrun: Launches) -> None:
    result = hvdxrun("-np", "2", "--dry-run", "touch", "made")
    assert result.code == 0
    assert not (hvdxrun.folder / "made").exists()
    assert re.search(r"2 ranks share \d+ cores?: \d+ threads? each", result.err)
    done = subprocess.run(
        ["sh", "-c", result.out],
        env=hvdxrun.environment(),
        cwd=hvdxrun.folder,
        timeout=60,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (hvdxrun.folder / "made").exists()


def test_another_family_first_on_path_does_no_harm(hvdxrun: Launches, fake_mpirun: Callable[[str], str]) -> None:
    folder = fake_mpirun("HYDRA build details:\n    Version:  5.0.2")
    result = hvdxrun.run(HELLO, PATH=folder + os.pathsep + os.environ["PATH"])
    assert (result.code, len(result.lines)) == (0, 2), result.err


def test_ten_starts_in_a_row(hvdxrun: Launches) -> None:
    program = hvdxrun.program("from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()")
    codes = [hvdxrun("-np", "2", hvdxrun.python, program).code for _ in range(10)]
    assert codes == [0] * 10


def test_the_launcher_does_not_import_tensorflow(hvdxrun: Launches) -> None:
    program = "import sys, hvdx.launch.hvdxrun, hvdx.cli; print('tensorflow' in sys.modules, 'mpi4py' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=hvdxrun.environment(),
        text=True,
        timeout=60,
        capture_output=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "False"]


def _shared_memory_since(began: float) -> list[str]:
    # Files in use belong to other jobs on this machine.
    used = leftovers._in_use(leftovers.SHARED_MEMORY)
    return [str(path) for path in leftovers._candidates(began, leftovers.SHARED_MEMORY) if str(path) not in used]


def _last(text: str) -> str:
    return text.rstrip().splitlines()[-1]


def _started(launches: Launches, how: str) -> subprocess.Popen[str]:
    process = launches.start("-np", "2", launches.python, launches.program(WAIT), how)
    assert process.stdout is not None
    # Both ranks say so after a barrier, so both are there when one has.
    assert process.stdout.readline().endswith("up\n")
    assert len(launches.left_over()) >= 4
    return process
