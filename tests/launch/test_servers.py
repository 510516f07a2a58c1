"""hvdxrun --servers: who is what, what is printed and written, and what the end of a worker or a server means."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from hvdx.launch import hvdxrun as command
from hvdx.launch.hosts import Host, assign
from hvdx.launch.plan import server_ranks
from hvdx.launch.rank import member_of, without_mpi
from tests.launch.conftest import Launches
from tests.launch.test_two_hosts import by_ssh, start
from tests.launch.two_hosts import TwoHosts

# What a strategy does, without its work: servers stay until all workers have left. The argument says who misbehaves.
PROGRAM = """
import os, signal, socket, sys, time
from hvdx.comm.addresses import contact
from hvdx.comm.launchers import detect
from hvdx.distribute.cluster import Role, resolve
from hvdx.distribute.meeting import meet

c = resolve()
how = sys.argv[1] if len(sys.argv) > 1 else ""
if how == "absent" and (c.role, c.index) == (Role.WORKER, 1):
    time.sleep(60)
if how == "early" and (c.role, c.index) == (Role.WORKER, 1):
    sys.exit(5)
m = meet(c, contact(1000 + c.index))
marks = sorted(name for name in os.environ if name.startswith(("OMPI_COMM", "PMI", "PRTE")))
print(c.source, c.role.value, c.index, c.workers, c.servers, detect(os.environ), marks, *m.servers, flush=True)
print("host", socket.gethostname(), os.environ["OMP_NUM_THREADS"], file=sys.stderr, flush=True)
if c.role is Role.WORKER:
    if c.index == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "all":
        sys.exit(4)
    if how == "server":
        found = m.wait_for_departures(0, 30)
        sys.exit(f"worker {c.index} heard of {found[0]}")
    if how == "kill":
        print("heard", *m.wait_for_departures(0, 30), flush=True)
    m.goodbye()
else:
    if c.index == 1 and how == "server":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    gone = 0
    while sum(one.role is Role.WORKER for one in m.departures()) < c.workers:
        gone = len(m.wait_for_departures(gone, 30))
    if how == "stays":
        time.sleep(60)
    m.goodbye()
"""


@pytest.fixture(autouse=True)
def no_tensorflow(tmp_path: Path) -> None:
    """What stands beside the program is found first: whoever imports it fails, and Pythons without it do as well."""
    (tmp_path / "tensorflow.py").write_text("raise ImportError('the members must not need TensorFlow to meet')")


def run(launches: Launches, how: str, *options: str, **variables: str) -> tuple[int, list[str], list[str], float]:
    result = launches.run(PROGRAM, "--servers", "2", *options, arguments=(how,), **variables)
    assert launches.wait_until_gone(3.0) == []
    return result.code, result.lines, result.err.splitlines(), result.seconds


def test_everybody_knows_its_place_and_nobody_believes_in_mpi(any_mpi: Launches) -> None:
    result = any_mpi.run(PROGRAM, "--servers", "2", "--output-filename", "logs", "--threads-per-rank", "3")
    assert result.code == 0, result.err
    both = "127.0.0.1:1000 127.0.0.1:1001"
    found = "Launcher(name='hvdxrun', size=2, rank={0}, variable='HVDX_EXPECTED_SIZE')"
    assert result.lines == [
        *(f"[{i}] hvdxrun worker {i} 2 2 {found.format(i)} [] {both}" for i in range(2)),
        *(f"[server {i}] hvdxrun server {i} 2 2 None [] {both}" for i in range(2)),
    ]
    notes = [line for line in result.err.splitlines() if "[hvdxrun]" in line]
    assert len(notes) == 1
    assert re.search(r"4 processes share \d+ cores?: 3 threads each as asked", notes[0])
    for name, tag in (("rank.0", "0"), ("rank.1", "1"), ("server.0", "server 0"), ("server.1", "server 1")):
        out = (any_mpi.folder / "logs" / name / "stdout").read_text()
        assert f"[{tag}] {out.strip()}" in result.lines
        assert (any_mpi.folder / "logs" / name / "stderr").read_text().endswith(" 3\n")


def test_by_default_the_death_of_a_worker_ends_the_job(any_mpi: Launches) -> None:
    code, _, errors, seconds = run(any_mpi, "kill")
    assert code == 137
    assert re.fullmatch(
        r"\[hvdxrun\] worker 1 on \S+ was ended by signal 9 \(SIGKILL\); the others were ended", errors[-1]
    )
    assert seconds < 15


def test_on_demand_the_others_go_on_and_the_lost_one_is_named(any_mpi: Launches) -> None:
    code, lines, errors, _ = run(any_mpi, "kill", "--on-worker-failure", "continue")
    assert code == 0, errors
    assert "[0] heard worker 1: was ended by signal 9 (SIGKILL)" in lines
    told = [line for line in errors if "worker 1 on" in line]
    assert re.fullmatch(r"\[hvdxrun\] worker 1 on \S+ was ended by signal 9 \(SIGKILL\); the others go on", told[0])
    assert re.fullmatch(r"\[hvdxrun\] lost on the way: worker 1 on \S+ was ended by signal 9 \(SIGKILL\)", errors[-1])
    assert len(told) == 2


def test_a_job_that_lost_all_workers_has_failed(hvdxrun: Launches) -> None:
    code, _, errors, _ = run(hvdxrun, "all", "--on-worker-failure", "continue")
    assert code == 4
    assert re.fullmatch(
        r"\[hvdxrun\] all workers were lost; the first: worker \d on \S+ exited with code 4", errors[-1]
    )


@pytest.mark.parametrize("policy", ["end", "continue"])
def test_the_death_of_a_server_ends_the_job_and_is_the_cause(any_mpi: Launches, policy: str) -> None:
    code, _, errors, seconds = run(any_mpi, "server", "--on-worker-failure", policy)
    assert code == 137, errors
    assert re.fullmatch(
        r"\[hvdxrun\] server 1 on \S+ was ended by signal 9 \(SIGKILL\); the others were ended", errors[-1]
    )
    assert not any("lost" in line for line in errors)
    assert seconds < 15


def test_a_server_that_stays_is_ended(any_mpi: Launches) -> None:
    code, _, errors, seconds = run(any_mpi, "stays", HVDX_SERVER_GRACE="1")
    assert code == 0
    sentence = (
        r"\[hvdxrun\] server 0, server 1 still ran 1 s after the last worker had ended \(HVDX_SERVER_GRACE\): ended"
    )
    assert re.fullmatch(sentence, errors[-1]), errors
    assert seconds < 20


def test_who_does_not_come_to_the_meeting_is_named(hvdxrun: Launches) -> None:
    code, _, errors, seconds = run(hvdxrun, "absent", "--start-timeout", "2")
    assert code == 1
    assert any("StallError" in line and "worker 1 of 2 did not come within 2 s" in line for line in errors)
    assert seconds < 20
    code, _, errors, _ = run(hvdxrun, "early", "--on-worker-failure", "continue")
    assert code == 1
    assert any("WorldError" in line and "worker 1 exited with code 5 before all had met" in line for line in errors)
    assert re.search(r"server \d on \S+ exited with code 1; the others were ended", errors[-1])


def test_a_signal_ends_workers_and_servers(hvdxrun: Launches) -> None:
    process = hvdxrun.start("-np", "1", "--servers", "1", hvdxrun.python, hvdxrun.program(PROGRAM), "stays")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert hvdxrun.wait_until_gone(5.0) == []


def test_dry_run_shows_the_command_and_no_secret(hvdxrun: Launches) -> None:
    result = hvdxrun("-np", "2", "--servers", "1", "-H", "localhost:3", "--dry-run", "true", HVDX_ROLE="server")
    assert result.code == 0
    assert "HVDX_EXPECTED_SIZE=2 HVDX_SERVERS=1 " in result.out
    assert "--servers 2 -- true" in result.out
    assert "HVDX_TOKEN" not in result.out + result.err
    assert re.search(r"3 processes share \d+ core", result.err)
    assert "hvdxrun itself is the scheduler" in result.err


@pytest.mark.parametrize(
    ("line", "understood"),
    [
        ("-np 2 --servers 0 true", "--servers '0' is no number of servers"),
        ("-np 2 --servers two true", "--servers 'two' is no number of servers"),
        (
            "-np 2 --servers 2 -H localhost:3 true",
            "-np 2 --servers 2 asks for more processes than the hosts have slots",
        ),
        ("--servers 2 -H localhost:2 true", "--servers 2 leaves no slot for a worker"),
        ("-np 2 --servers 1 --on-worker-failure restart true", "--on-worker-failure 'restart' is not known"),
        ("-np 2 --on-worker-failure continue true", "needs --servers"),
    ],
)
def test_bad_values_are_refused_in_a_sentence(line: str, understood: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(line.split()) == 2
    said = capsys.readouterr().err
    assert understood in said
    assert len(said.splitlines()) == 1


def test_servers_are_spread_over_the_hosts() -> None:
    assert server_ranks(4, 2) == (1, 3)
    assert server_ranks(3, 1) == (2,)
    assert server_ranks(5, 3) == (0, 2, 4)
    assert assign(3, (Host("a", None), Host("b", None)), 1) == (Host("a", 2), Host("b", 2))
    # a: ranks 0-2, b: 3-5
    assert [member_of(rank, server_ranks(6, 2)) for rank in range(6)] == [
        ("worker", 0), ("worker", 1), ("server", 0), ("worker", 2), ("worker", 3), ("server", 1),
    ]  # fmt: skip
    assert member_of(3, ()) == ("rank", 3)


def test_marks_of_mpi_are_hidden_and_settings_kept() -> None:
    marks = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "PRTE_X": "1"}
    kept = {"OMPI_MCA_btl": "^ofi", "PATH": "/bin", "OMP_NUM_THREADS": "2"}
    assert without_mpi(marks | kept, "server", 1) == {**kept, "HVDX_ROLE": "server", "HVDX_INDEX": "1"}


def test_on_two_hosts_each_has_a_server_and_all_reach_them(any_mpi: Launches, hosts: TwoHosts) -> None:
    line = [*by_ssh(hosts), "-np", "2", "--servers", "2", "-H", "hosta:2,hostb:2"]
    result = start(any_mpi, hosts, *line, any_mpi.python, any_mpi.program(PROGRAM), "kill")
    assert result.code == 137, result.err
    assert re.search(r"worker 1 on hostb was ended by signal 9", result.err.splitlines()[-1])
    line += ["--on-worker-failure", "continue", any_mpi.python, any_mpi.program(PROGRAM), "kill"]
    result = start(any_mpi, hosts, *line)
    assert result.code == 0, result.err
    assert sum("10.77.1.1:1000 10.77.1.2:1001" in text for text in result.lines) == 4, result.lines
    assert "[0] heard worker 1: was ended by signal 9 (SIGKILL)" in result.lines
    for tag, host in (("0", "hosta"), ("1", "hostb"), ("server 0", "hosta"), ("server 1", "hostb")):
        assert f"[{tag}] host {host}" in result.err
    assert any_mpi.wait_until_gone(5.0) == []
