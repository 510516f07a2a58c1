"""hvdxrun on two hosts, reached by ssh: two network namespaces with their own names, made and removed here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.launch.conftest import HVDXRUN, Launches, Result
from tests.launch.test_runs import DEATH
from tests.launch.two_hosts import NETWORK, PORT, TwoHosts

WHERE = """
import os, socket
from mpi4py import MPI
c = MPI.COMM_WORLD
print(socket.gethostname(), "sum", c.allreduce(c.rank + 1), os.environ.get("TF_MINE"), os.environ["HVDX_EXPECTED_SIZE"])
"""


def start(launches: Launches, hosts: TwoHosts, *arguments: str, **variables: str) -> Result:
    """Run hvdxrun on hosta."""
    done = subprocess.run(
        hosts.on("hosta", [*HVDXRUN, *arguments]), env=launches.environment(**variables), cwd=launches.folder,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr, 0.0)


def by_ssh(hosts: TwoHosts) -> list[str]:
    return ["-p", str(PORT), "-i", hosts.key]


def test_ranks_run_on_both_hosts_with_the_variables(any_mpi: Launches, hosts: TwoHosts) -> None:
    line = [*by_ssh(hosts), "-np", "4", "-H", "hosta:2,hostb:2", any_mpi.python, any_mpi.program(WHERE)]
    result = start(any_mpi, hosts, *line, TF_MINE="here")
    assert result.code == 0, result.err
    names = ["hosta", "hosta", "hostb", "hostb"]
    assert result.lines == [f"[{rank}] {name} sum 10 here 4" for rank, name in enumerate(names)]
    assert result.err.count("2 ranks share") == 1


def test_a_hostfile_with_unequal_slots(any_mpi: Launches, hosts: TwoHosts) -> None:
    (any_mpi.folder / "hosts").write_text("# two hosts\nhosta slots=1\nhostb:2\n")
    line = [*by_ssh(hosts), "--hostfile", "hosts", any_mpi.python, any_mpi.program(WHERE)]
    result = start(any_mpi, hosts, *line)
    assert result.code == 0, result.err
    assert [text.split()[1] for text in result.lines] == ["hosta", "hostb", "hostb"]


def test_the_network_can_be_named(hvdxrun: Launches, hosts: TwoHosts) -> None:
    line = [*by_ssh(hosts), "--network-interfaces", NETWORK, "-np", "2", "-H", "hosta:1,hostb:1"]
    result = start(hvdxrun, hosts, *line, hvdxrun.python, hvdxrun.program(WHERE))
    assert result.code == 0, result.err


@pytest.mark.parametrize(("how", "code"), [("code", 3), ("kill", 137), ("exception", 1)])
def test_death_on_the_other_host_is_named_not_the_peer_that_noticed(
    any_mpi: Launches, hosts: TwoHosts, how: str, code: int
) -> None:
    line = [*by_ssh(hosts), "-np", "2", "-H", "hosta:1,hostb:1", any_mpi.python, any_mpi.program(DEATH), how]
    result = start(any_mpi, hosts, *line)
    assert result.code == code, result.err
    assert re.match(r"\[hvdxrun\] rank 1 on hostb .*; the others were ended", result.err.splitlines()[-1])
    if how == "exception":
        assert "[1] ValueError: boom in rank 1" in result.err
    assert any_mpi.wait_until_gone(5.0) == []


def test_a_host_that_ssh_cannot_reach(hvdxrun: Launches, hosts: TwoHosts) -> None:
    result = start(hvdxrun, hosts, *by_ssh(hosts), "-np", "2", "-H", "hosta:1,hostc:1", "true")
    assert result.code == 2
    assert "Host hostc cannot be reached by ssh" in result.err
    assert "ssh -o BatchMode=yes" in result.err


def test_a_wrong_key_is_told_in_sshs_words(hvdxrun: Launches, hosts: TwoHosts, tmp_path: Path) -> None:
    key = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    line = ["-p", str(PORT), "-i", str(key), "-np", "2", "-H", "hosta:1,hostb:1", "true"]
    result = start(hvdxrun, hosts, *line)
    assert result.code == 2
    assert "Host hostb cannot be reached by ssh" in result.err
    assert "Permission denied" in result.err
