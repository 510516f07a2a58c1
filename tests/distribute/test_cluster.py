"""Who takes part: each source alone, sources together, and every contradiction in a sentence with both values."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf

from hvdx.comm import slurm
from hvdx.distribute.cluster import UNNUMBERED, Cluster, Role, resolve
from hvdx.errors import ConfigurationError, HvdxError, WorldError

W, S = Role.WORKER, Role.SERVER
HVDXRUN = {
    "HVDX_ROLE": "worker", "HVDX_INDEX": "1", "HVDX_EXPECTED_SIZE": "2", "HVDX_SERVERS": "1", "HVDX_ROOT": "a:1,b:1",
    "HVDX_TOKEN": "secret",
}  # fmt: skip
DMLC = {
    "DMLC_ROLE": "worker", "DMLC_WORKER_ID": "1", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1",
    "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000",
}  # fmt: skip
LISTED: dict[str, list[str]] = {"worker": ["a:1", "b:1"], "ps": ["a:2"]}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def mpi(size: int, rank: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_RANK": str(rank)}


def tf_config(job: str | None, index: int = 0, cluster: Any = LISTED) -> dict[str, str]:
    task = {"task": {"type": job, "index": index}} if job else {}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, **task})}


def shape(cluster: Cluster) -> tuple[str, Role, int, int, int]:
    return cluster.source, cluster.role, cluster.index, cluster.workers, cluster.servers


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("this process alone", W, 0, 1, 0)),
        (mpi(3, 2), ("Open MPI's mpirun", W, 2, 3, 0)),
        ({**mpi(3, 2), "HVDX_EXPECTED_SIZE": "3"}, ("hvdxrun", W, 2, 3, 0)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, ("an MPI launcher of the MPICH family", W, 1, 2, 0)),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, ("horovodrun (Gloo)", W, 1, 2, 0)),
        (HVDXRUN, ("hvdxrun", W, 1, 2, 1)),
        ({**HVDXRUN, "HVDX_ROLE": "server", "HVDX_INDEX": "0"}, ("hvdxrun", S, 0, 2, 1)),
        (DMLC, ("the DMLC variables", W, 1, 2, 1)),
        ({**DMLC, "DMLC_ROLE": "server"}, ("the DMLC variables", S, UNNUMBERED, 2, 1)),
        ({**DMLC, "DMLC_ROLE": "scheduler"}, ("the DMLC variables", Role.SCHEDULER, 0, 2, 1)),
        ({"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1"}, ("the DMLC variables", W, 0, 1, 0)),
        (tf_config("worker", 1), ("TF_CONFIG", W, 1, 2, 1)),
        (tf_config("ps"), ("TF_CONFIG", S, 0, 2, 1)),
        (tf_config("worker", 0, {"chief": ["c:1"], **LISTED}), ("TF_CONFIG", W, 1, 3, 1)),
        (tf_config("chief", 0, {"chief": ["c:1"], **LISTED}), ("TF_CONFIG", W, 0, 3, 1)),
        (tf_config("evaluator"), ("TF_CONFIG, an evaluator", W, 0, 1, 0)),
        ({"TF_CONFIG": '{"model_dir": "m"}'}, ("this process alone", W, 0, 1, 0)),
        ({**tf_config("worker", 1), **mpi(3, 1)}, ("TF_CONFIG", W, 1, 2, 1)),
        ({**tf_config(None), **mpi(3, 2)}, ("TF_CONFIG", S, 0, 2, 1)),
        ({**DMLC, **mpi(2, 1)}, ("the DMLC variables", W, 1, 2, 1)),
        ({**tf_config("ps"), **DMLC, "DMLC_ROLE": "server"}, ("the DMLC variables", S, 0, 2, 1)),
        (SLURM, ("Slurm's srun", W, 2, 4, 0)),
        ({**SLURM, "HVDX_SERVERS": "2"}, ("Slurm's srun", W, 1, 2, 2)),
        ({**SLURM, "HVDX_SERVERS": "2", "SLURM_PROCID": "3"}, ("Slurm's srun", S, 1, 2, 2)),
        ({**SLURM, "HVDX_SERVERS": "2", "PMI_SIZE": "4", "PMI_RANK": "2"}, ("Slurm's srun", W, 1, 2, 2)),
    ],
)  # fmt: skip
def test_each_source_tells_the_place(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    assert shape(resolve(environ)) == expected


def test_where_the_members_meet() -> None:
    assert resolve({}).root == resolve(mpi(2, 0)).root == resolve(SLURM).root == ()
    found = resolve(HVDXRUN)
    assert (found.root, found.scheduler_apart, found.token) == (("a:1", "b:1"), True, "secret")
    assert "secret" not in repr(found)
    dmlc = [resolve({**DMLC, "DMLC_ROLE": role}) for role in ("worker", "server", "scheduler")]
    assert {(c.root, c.scheduler_apart, c.token) for c in dmlc} == {(("10.0.0.1:9000",), True, dmlc[0].token)}
    assert len(dmlc[0].token) == 64
    listed = resolve(tf_config("ps"))
    assert (listed.root, listed.scheduler_apart) == (("a:2",), False)
    assert listed.token == resolve(tf_config("worker", 1)).token != dmlc[0].token
    assert resolve({**tf_config("ps"), "HVDX_ROOT": "z:5"}).root == ("z:5",)
    with pytest.raises(ConfigurationError, match=r"HVDX_ROOT must be host:port.*Received: 'z'"):
        resolve({**tf_config("ps"), "HVDX_ROOT": "z"})


def test_addresses_are_those_of_the_list() -> None:
    assert dict(resolve(tf_config("worker")).addresses) == {"worker": ("a:1", "b:1"), "ps": ("a:2",)}
    assert dict(resolve(mpi(2, 0)).addresses) == {}


@pytest.mark.parametrize("cluster", [LISTED, tf.train.ClusterSpec(LISTED)])
def test_the_argument_gets_the_place_from_whoever_knows_it(cluster: Any) -> None:
    name = "the argument cluster="
    assert shape(resolve(mpi(3, 2), cluster)) == (name, S, 0, 2, 1)
    assert shape(resolve(tf_config("worker", 1), cluster)) == (name, W, 1, 2, 1)
    assert shape(resolve(HVDXRUN, cluster)) == (name, W, 1, 2, 1)
    assert resolve(HVDXRUN, cluster).root == ("a:1", "b:1")
    assert shape(resolve({**DMLC, "DMLC_ROLE": "server"}, cluster)) == (name, S, UNNUMBERED, 2, 1)
    with pytest.raises(WorldError, match=r"2 worker\(s\) and 1 server\(s\), but nothing says which"):
        resolve({}, cluster)
    assert shape(resolve({}, {"worker": ["a:1"]})) == (name, W, 0, 1, 0)


@pytest.mark.parametrize(
    ("environ", "cluster", "sentence"),
    [
        # two sources, with both values
        ({**tf_config("worker", 1, {"worker": ["a:1", "b:1", "c:1"]}), **mpi(2, 1)}, None,
         r"TF_CONFIG says 3 worker\(s\) \(TF_CONFIG=.*but Open MPI's mpirun started 2 .*OMPI_COMM_WORLD_SIZE=2"),
        ({**tf_config("worker", 1), **mpi(3, 0)}, None,
         r"TF_CONFIG says that this is worker 1 .* by Open MPI's mpirun it is worker 0 \(rank 0\)"),
        ({**tf_config("ps"), **mpi(3, 0)}, None, r"TF_CONFIG says that this is server 0 .* it is"),
        ({**DMLC, **mpi(4, 1)}, None, r"the DMLC variables says? 2 worker.*started 4"),
        ({**DMLC, **tf_config("worker", 0)}, None,
         r"the DMLC variables and TF_CONFIG contradict each other: its index is 1 by the DMLC .* its index is 0 by TF"),
        ({**DMLC, **tf_config("ps")}, None, r"this process is a worker by the DMLC .* this process is a server by TF"),
        ({**HVDXRUN, **DMLC, "DMLC_NUM_SERVER": "2"}, None, r"1 server by hvdxrun \(.*2 servers by the DMLC"),
        ({**mpi(2, 0), "HVDX_EXPECTED_SIZE": "4"}, None, r"hvdxrun started 4 .*but Open MPI's mpirun says 2"),
        (HVDXRUN, {"worker": ["a:1"], "ps": ["a:2"]}, r"1 worker by the argument cluster= .*2 workers by hvdxrun"),
        (mpi(4, 0), LISTED, r"the argument cluster= says 2 worker\(s\) and 1 server\(s\) .*started 4 process"),
        # out of range
        (mpi(2, 2), None, r"this is rank 2 of 2 .*ranks go from 0 to 1"),
        ({**HVDXRUN, "HVDX_INDEX": "2"}, None, r"hvdxrun says that this is worker 2, but of 2 worker\(s\) the last is"),
        ({**DMLC, "DMLC_WORKER_ID": "2"}, None, r"this is worker 2, but of 2 worker\(s\) the last is worker 1"),
        (tf_config("worker", 2), None, r"TF_CONFIG cannot be used: the task's index 2 is beyond the 2 task\(s\)"),
        # malformed
        ({**DMLC, "DMLC_ROLE": "joint"}, None, r"DMLC_ROLE must be worker, server or scheduler.*DMLC_ROLE=joint"),
        ({"DMLC_NUM_WORKER": "2"}, None, r"DMLC_ROLE must be"),
        ({**DMLC, "DMLC_NUM_WORKER": "two"}, None, r"DMLC_NUM_WORKER must be a whole number, 1 or more.*=two"),
        ({**DMLC, "DMLC_PS_ROOT_PORT": ""}, None, r"must say where the scheduler is"),
        ({n: v for n, v in DMLC.items() if n != "DMLC_WORKER_ID"}, None, r"no DMLC_WORKER_ID, and there are 2 workers"),
        ({"HVDX_ROLE": "worker"}, None, r"HVDX_ROLE is set.*but not all of them are"),
        ({**HVDXRUN, "HVDX_ROLE": "chief"}, None, r"HVDX_ROLE='chief' cannot be used"),
        ({**HVDXRUN, "HVDX_INDEX": "-1"}, None, r"HVDX_INDEX='-1' cannot be used"),
        ({**mpi(2, 0), "HVDX_SERVERS": "1"}, None, r"HVDX_SERVERS=1 asks for parameter servers, but Open MPI's"),
        ({**SLURM, **mpi(4, 2), "HVDX_SERVERS": "1"}, None, r"asks for parameter servers, but Open MPI's"),
        ({**SLURM, "PMI_SIZE": "8", "PMI_RANK": "2", "HVDX_SERVERS": "1"}, None, r"but an MPI launcher of the MPICH"),
        ({"TF_CONFIG": "{"}, None, r"TF_CONFIG cannot be used: .*Received: '\{'"),
        ({"TF_CONFIG": "[]"}, None, r"it is no JSON object"),
        (tf_config("gpu"), None, r"the task's type 'gpu' is no job of `cluster`"),
        (tf_config("worker", 0, {"worker": ["a"]}), None, r"worker 0 has the address 'a', which is no host:port"),
        (tf_config("worker", 0, {"worker": "a:1"}), None, r"'worker' is 'a:1', but must be a list"),
        (tf_config("worker", 0, {"worker": ["a:1"], "ps": ["a:1"]}), None, r"ps 0 and worker 0 have the same address"),
        ({}, {"server": ["a:1"]}, r"cluster= cannot be used: 'server' is no job.*chief, master, worker, ps, evaluator"),
        ({}, {"ps": ["a:1"]}, r"it names no worker"),
        ({}, 3, r"cluster= cannot be used.*Received: 3"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[2-1]"}, None, r"Slurm's variables cannot be used: \[2-1\]"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}, None, r"4 task\(s\) .* on 2 node\(s\) .*, but 6 by 2"),
        ({**SLURM, "HVDX_SERVERS": "4"}, None, r"Of 4 task\(s\) 4 cannot be servers"),
        ({**SLURM, "HVDX_SERVERS": "1", "SLURM_DISTRIBUTION": "plane=2"}, None, r"Set HVDX_ROOT=host:port"),
    ],
)  # fmt: skip
def test_what_contradicts_or_is_malformed_is_refused(environ: dict[str, str], cluster: Any, sentence: str) -> None:
    with pytest.raises(HvdxError, match=sentence):
        resolve(environ, cluster)


def test_slurms_tasks_have_addresses_that_all_work_out_alike() -> None:
    environ = {**SLURM, "HVDX_SERVERS": "2"}
    found = [resolve({**environ, "SLURM_PROCID": str(rank)}) for rank in range(4)]
    port = slurm.port(SLURM, 0)
    # two ranks a node, of which the second is a server
    addresses = {"worker": (f"n1:{port}", f"n2:{port}"), "ps": (f"n1:{port + 1}", f"n2:{port + 1}")}
    assert all(dict(c.addresses) == addresses and c.root == addresses["ps"][:1] for c in found)
    assert len({c.token for c in found}) == 1
    assert resolve({**environ, "SLURM_JOB_ID": "8"}).token != found[0].token
    assert resolve({**environ, "HVDX_ROOT": "n9:1", "SLURM_DISTRIBUTION": "arbitrary"}).root == ("n9:1",)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node1", ["node1"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("a-[08-10],gpu.x,b[1]", ["a-08", "a-09", "a-10", "gpu.x", "b1"]),
        ("r[1-2]n[01,3]", ["r1n01", "r1n3", "r2n01", "r2n3"]),
    ],
)
def test_lists_of_nodes(text: str, nodes: list[str]) -> None:
    assert list(slurm.expand(text)) == nodes


@pytest.mark.parametrize("text", ["", "n[1-", "n[a]", "n[]", "n[1]]", "a,,b", "a b", "[", "n[3-1]"])
def test_no_list_of_nodes(text: str) -> None:
    with pytest.raises(ValueError):
        slurm.expand(text)


def test_the_order_of_slurms_tasks() -> None:
    environ = {**SLURM, "SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_TASKS_PER_NODE": "3,1"}
    assert slurm.hosts_of_ranks(environ, 4) == ("a", "a", "a", "b")
    assert slurm.hosts_of_ranks({**environ, "SLURM_DISTRIBUTION": "cyclic:block"}, 4) == ("a", "b", "a", "a")
    assert slurm.hosts_of_ranks({"SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "2"}, 2) == ("a", "a")
    assert slurm.hosts_of_ranks({}, 2) == ()
    with pytest.raises(ConfigurationError, match="no list of tasks per node"):
        slurm.hosts_of_ranks({**environ, "SLURM_STEP_TASKS_PER_NODE": "3x1"}, 4)
    assert 20000 <= slurm.port({"SLURM_JOB_ID": "99999999", "SLURM_STEP_ID": "77"}, 63) < 32000


def test_resolving_needs_no_tensorflow() -> None:
    source = "import sys; from hvdx.distribute import cluster, meeting; print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
