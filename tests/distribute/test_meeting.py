"""The members of a job meet, or are told who is missing or in the way; and they learn who leaves and why."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdx.comm.addresses import Contact, contact, free_port
from hvdx.distribute.cluster import UNNUMBERED, Cluster, Role
from hvdx.distribute.meeting import Departure, Members, meet, run_scheduler
from hvdx.errors import ConfigurationError, StallError, WorldError
from hvdx.launch.line_server import listen
from hvdx.launch.scheduler import Job, Left, Scheduler

W, S = Role.WORKER, Role.SERVER
SOON = 20.0


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDX_START_TIMEOUT", "20")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture
def apart() -> Iterator[Callable[..., tuple[Scheduler, Cluster]]]:
    """Make a scheduler in a thread, as hvdxrun has it, and the cluster of its worker 0."""
    made = []

    def make(workers: int = 2, servers: int = 2, limit: float = SOON, told: float = 0.0) -> tuple[Scheduler, Cluster]:
        scheduler = Scheduler(listen(), Job(workers, servers, "secret", limit), told)
        scheduler.start()
        made.append(scheduler)
        root = (f"127.0.0.1:{scheduler.port}",)
        return scheduler, Cluster("a test", W, 0, workers, servers, root, {}, True, "secret")

    yield make
    for scheduler in made:
        scheduler.close()


def come(pool: ThreadPoolExecutor, cluster: Cluster, role: Role, index: int, **more: Any) -> Future[Members]:
    port = {W: 100, S: 200}[role] + index
    return pool.submit(meet, replace(cluster, role=role, index=index), contact(port), **more)


def all_come(pool: ThreadPoolExecutor, cluster: Cluster) -> dict[tuple[Role, int], Members]:
    places = [(role, i) for role, count in ((W, cluster.workers), (S, cluster.servers)) for i in range(count)]
    futures = {place: come(pool, cluster, *place) for place in places}
    return {place: future.result(SOON) for place, future in futures.items()}


def until(members: Members, number: int) -> list[tuple[Role, int, str, bool]]:
    """Return the departures once there are so many."""
    found = members.wait_for_departures(number - 1, SOON)
    return [(one.role, one.index, one.reason, one.orderly) for one in found]


def test_all_learn_the_addresses_and_who_leaves(pool: ThreadPoolExecutor, apart: Any) -> None:
    scheduler, cluster = apart()
    members = all_come(pool, cluster)
    for (role, index), one in members.items():
        assert (one.role, one.index) == (role, index)
        assert one.servers == ("127.0.0.1:200", "127.0.0.1:201")
        assert one.workers == ("127.0.0.1:100", "127.0.0.1:101")
        assert one.departures() == ()
    members[W, 1].goodbye("all steps done")
    members[W, 1].goodbye("a second time")
    assert until(members[S, 0], 1) == [(W, 1, "all steps done", True)]
    scheduler.report(Left("worker", 0, "was ended by signal 9 (SIGKILL)", False))
    gone = [(W, 1, "all steps done", True), (W, 0, "was ended by signal 9 (SIGKILL)", False)]
    assert until(members[S, 0], 2) == gone == until(members[S, 1], 2)
    assert str(members[S, 1].departures()[1]) == "worker 0: was ended by signal 9 (SIGKILL)"
    for index in range(2):
        members[S, index].goodbye()
    scheduler.join(SOON)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", scheduler.port), timeout=5)


def test_servers_on_several_hosts_are_told_by_the_network_they_share(pool: ThreadPoolExecutor, apart: Any) -> None:
    _, cluster = apart(1, 2)
    contacts = [
        Contact("a", ("10.1.0.1/24",), ()),
        Contact("a", ("10.1.0.1/24",), (5,)),
        Contact("b", ("10.1.0.2/24",), (5,)),
    ]
    places = [(W, 0), (S, 0), (S, 1)]
    futures = [
        pool.submit(meet, replace(cluster, role=role, index=index), own)
        for (role, index), own in zip(places, contacts, strict=True)
    ]
    for future in futures:
        assert future.result(SOON).servers == ("10.1.0.1:5", "10.1.0.2:5")
        assert future.result().workers == ("",)


def test_a_scheduler_of_its_own_numbers_servers_and_ends_with_the_last(pool: ThreadPoolExecutor) -> None:
    root = (f"127.0.0.1:{free_port()}",)
    cluster = Cluster("the DMLC variables", W, 0, 1, 2, root, {}, True, "t")
    scheduler = pool.submit(run_scheduler, replace(cluster, role=Role.SCHEDULER))
    futures = [come(pool, cluster, W, 0), come(pool, cluster, S, UNNUMBERED), come(pool, cluster, S, UNNUMBERED)]
    worker, *servers = (future.result(SOON) for future in futures)
    assert sorted(server.index for server in servers) == [0, 1]
    for one in (worker, *servers):
        one.goodbye("end")
    left = scheduler.result(SOON)
    assert {(one.role, one.index) for one in left} == {(W, 0), (S, 0), (S, 1)}
    assert all(one.orderly and one.reason == "end" for one in left)


def test_server_0_is_the_scheduler_where_nobody_else_is_and_stays_to_the_last(pool: ThreadPoolExecutor) -> None:
    cluster = Cluster("TF_CONFIG", W, 0, 1, 2, (f"127.0.0.1:{free_port()}",), token="t")
    members = all_come(pool, cluster)
    leaving = pool.submit(members[S, 0].goodbye)
    assert until(members[W, 0], 1) == [(S, 0, "done", True)]
    members[S, 1].goodbye()
    assert not leaving.done()
    assert [one[:2] for one in until(members[W, 0], 2)] == [(S, 0), (S, 1)]
    members[W, 0].goodbye()
    leaving.result(SOON)


def test_the_same_number_twice_ends_the_meeting_for_all(pool: ThreadPoolExecutor, apart: Any) -> None:
    _, cluster = apart()
    futures = [come(pool, cluster, W, 0), come(pool, cluster, S, 1), come(pool, cluster, W, 0)]
    for future in futures:
        with pytest.raises(WorldError, match=r"two processes say that they are worker 0, one on \S+ and one on"):
            future.result(SOON)


@pytest.mark.parametrize("own_process", [False, True])
def test_who_does_not_come_is_named(
    own_process: bool, pool: ThreadPoolExecutor, apart: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDX_START_TIMEOUT", "1.5")
    scheduler = None
    if own_process:
        cluster = Cluster("the DMLC variables", W, 0, 2, 2, (f"127.0.0.1:{free_port()}",), {}, True, "t")
        scheduler = pool.submit(run_scheduler, replace(cluster, role=Role.SCHEDULER))
    else:
        _, cluster = apart(limit=1.5)
    futures: list[Future[Any]] = [come(pool, cluster, W, 0), come(pool, cluster, S, UNNUMBERED)]
    futures += [scheduler] if scheduler else []
    began = time.monotonic()
    words = r"worker 1 of 2, server 1 of 2 did not come within 1.5 s \(HVDX_START_TIMEOUT\); of 4 members 2 came"
    for future in futures:
        with pytest.raises(StallError, match=words):
            future.result(SOON)
    assert time.monotonic() - began < 10
    if not own_process:  # who comes later is told the same at once
        with pytest.raises(StallError, match="worker 1 of 2"):
            come(pool, cluster, W, 1).result(SOON)


def test_a_scheduler_that_does_not_come_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDX_START_TIMEOUT", "0.5")
    port = free_port()
    cluster = Cluster("a test", W, 0, 1, 1, (f"127.0.0.1:{port}",), {}, True, "t")
    with pytest.raises(StallError, match=rf"The scheduler did not come within 0.5 s .*127.0.0.1:{port}: .*refused"):
        meet(cluster, contact())
    with pytest.raises(StallError, match="Server 0, which is the scheduler, did not come"):
        meet(replace(cluster, scheduler_apart=False), contact())


def test_who_ends_before_all_have_met_is_named(pool: ThreadPoolExecutor, apart: Any) -> None:
    scheduler, cluster = apart()
    waiting = come(pool, cluster, S, 0)
    scheduler.report(Left("worker", 1, "exited with code 3", False))
    with pytest.raises(WorldError, match="worker 1 exited with code 3 before all had met"):
        waiting.result(SOON)


def test_a_taken_port_is_named() -> None:
    with listen() as taken:
        port = taken.getsockname()[1]
        cluster = Cluster("the DMLC variables", Role.SCHEDULER, 0, 1, 1, (f"127.0.0.1:{port}",), {}, True, "t")
        with pytest.raises(WorldError, match=rf"cannot listen on port {port} .*the DMLC variables.*already in use"):
            run_scheduler(cluster)
        with pytest.raises(WorldError, match=f"cannot listen on port {port}"):
            meet(replace(cluster, role=S, scheduler_apart=False), contact(1))


def test_strangers_do_not_count_and_disturb_nobody(pool: ThreadPoolExecutor, apart: Any) -> None:
    scheduler, cluster = apart(1, 1)
    with pytest.raises(WorldError, match="another token than this job's"):
        come(pool, replace(cluster, token="guessed"), W, 0).result(SOON)
    with pytest.raises(WorldError, match=r"believes in 1 worker\(s\) and 2 server\(s\).*told 1 and 1"):
        come(pool, replace(cluster, servers=2), S, 1).result(SOON)
    with pytest.raises(WorldError, match=r"no worker 7 in this job: the numbers go from 0 to 0"):
        come(pool, cluster, W, 7).result(SOON)
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b"{}\n",
        b'{"hello": 3}\n',
        b"x" * 100_000,
        b"\xff\n",
        b'{"goodbye": ""}\n',
    ):
        with socket.create_connection(("127.0.0.1", scheduler.port), timeout=SOON) as stranger:
            stranger.sendall(words)
            answer = b""
            try:
                while piece := stranger.recv(4096):
                    answer += piece
            except ConnectionResetError:
                pass
            assert b"welcome" not in answer
            assert b"members" not in answer
    members = all_come(pool, cluster)
    with pytest.raises(WorldError, match="have already met"):
        come(pool, cluster, W, 0).result(SOON)
    assert members[W, 0].departures() == ()


def test_only_members_meet() -> None:
    with pytest.raises(ConfigurationError, match="by this process alone"):
        meet(Cluster("this process alone", W, 0, 1, 0), contact())


MEMBER = """
import os, sys, time
from hvdx.comm.addresses import contact
from hvdx.distribute.cluster import Cluster, Role
from hvdx.distribute.meeting import meet
root, index = sys.argv[1:]
members = meet(Cluster("a test", Role.WORKER, int(index), 2, 1, (root,), {}, True, "secret"), contact())
print("met", flush=True)
if os.fork() == 0:
    os.close(1)
    time.sleep(4)
    os._exit(0)
print("forked", flush=True)
time.sleep(60)
"""


def test_a_death_is_noticed_by_its_connection_and_named_by_the_launcher(
    pool: ThreadPoolExecutor, apart: Any, tmp_path: Path
) -> None:
    scheduler, cluster = apart(2, 1, told=0.5)
    (tmp_path / "member.py").write_text(MEMBER)
    root = Path(__file__).resolve().parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    processes = [
        subprocess.Popen([sys.executable, str(tmp_path / "member.py"), cluster.root[0], str(index)],
                         env=environ, stdout=subprocess.PIPE, text=True)
        for index in range(2)
    ]  # fmt: skip
    try:
        heard: list[Departure] = []
        came = threading.Event()
        server = come(pool, cluster, S, 0, on_departure=lambda one: (heard.append(one), came.set())).result(SOON)
        for process in processes:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == ["met\n", "forked\n"]
        began = time.monotonic()
        processes[1].send_signal(signal.SIGKILL)
        assert until(server, 1) == [(W, 1, "its connection to the scheduler closed without a goodbye", False)]
        assert time.monotonic() - began < 3  # before the child of the dead has ended
        assert came.wait(SOON)
        assert heard == list(server.departures())
        processes[0].send_signal(signal.SIGKILL)
        scheduler.report(Left("worker", 0, "was ended by signal 9 (SIGKILL)", False))
        assert until(server, 2)[1] == (W, 0, "was ended by signal 9 (SIGKILL)", False)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    scheduler.close()
    assert until(server, 3)[2][:2] == (Role.SCHEDULER, 0)


def test_nothing_but_json_lines_travels(pool: ThreadPoolExecutor, apart: Any) -> None:
    """A member written by hand meets as any other."""
    scheduler, cluster = apart(1, 1)
    server = come(pool, cluster, S, 0)
    with socket.create_connection(("127.0.0.1", scheduler.port), timeout=SOON) as member:
        stream = member.makefile("rw")
        hello = {"token": "secret", "role": "worker", "index": 0, "workers": 1, "servers": 1, "contact": ["h", [], []]}
        stream.write(json.dumps({"hello": hello}) + "\n")
        stream.flush()
        assert json.loads(stream.readline()) == {"welcome": True}
        told = json.loads(stream.readline())
        assert told["index"] == 0
        assert told["members"]["worker"] == [["h", [], []]]
        server.result(SOON).goodbye("bye")
        assert json.loads(stream.readline()) == {
            "left": {"role": "server", "index": 0, "reason": "bye", "orderly": True}
        }
