"""Which algorithm is used: the measured table, and ranks that were told different ones."""

from __future__ import annotations

import json
from pathlib import Path

from hvdx.comm.algorithms import ALGORITHMS, measured
from tests.support.jobs import run_ranks

PROGRAM = """
import os
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    os.environ["HVDX_ALLREDUCE"] = "mpi"
import tensorflow as tf
import hvdx as hvd

try:
    hvd.init("mpi")
except hvd.MismatchError as error:
    print("refused:", error)
os.environ["HVDX_ALLREDUCE"] = "tree"
hvd.init("mpi")
print("sum", hvd.allreduce(tf.ones([5]), hvd.Sum).numpy().tolist())
from hvdx.world import communicator

print("sent", communicator()._buffers._channel.bytes_sent)
"""


def test_thresholds() -> None:
    thresholds = measured.to_thresholds({"1024": "ring", "0": "recursive_doubling", "65536": "mpi"})
    chosen = [measured.choose(thresholds, nbytes) for nbytes in (1, 1023, 1024, 65535, 65536, 1 << 40)]
    assert chosen == ["recursive_doubling", "recursive_doubling", "ring", "ring", "mpi", "mpi"]


def test_topologies_are_compared_by_ranks_on_each_host() -> None:
    assert measured.ranks_per_host([0, 1, 0, 0]) == (3, 1)
    assert measured.ranks_per_host([0, 0, 0, 1]) == (3, 1)
    assert measured.ranks_per_host([0, 1]) == (1, 1)


def test_a_row_replaces_that_of_the_same_topology_and_is_found(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text('{"rows": []}')
    row = {"library": "MPICH", "ranks per host": [2, 2], "from bytes": {"0": "tree"}}
    measured.write(row, path)
    measured.write({**row, "ranks per host": [4]}, path)
    measured.write({**row, "from bytes": {"0": "mpi", "100": "ring"}}, path)
    assert [one["ranks per host"] for one in json.loads(path.read_text())["rows"]] == [[4], [2, 2]]
    assert measured.lookup("MPICH", (2, 2), path) == ((0, 100), ("mpi", "ring"))
    assert measured.lookup("MPICH", (4,), path) == ((0,), ("tree",))
    assert measured.lookup("Open MPI", (4,), path) == ((0,), ("mpi",))
    assert measured.choose(measured.lookup("Open MPI", (1, 1), path), 1 << 20) == "recursive_doubling"


def test_the_table_of_the_package_can_be_used() -> None:
    for row in measured.read():
        begins, names = measured.to_thresholds(row["from bytes"])
        assert begins[0] == 0
        assert set(names) <= {*ALGORITHMS, "mpi"}
        assert measured.lookup(row["library"], tuple(row["ranks per host"])) == (begins, names)


def test_different_choices_are_refused_on_every_rank_and_equal_ones_reach_the_algorithm(tmp_path: Path) -> None:
    path = tmp_path / "choice_program.py"
    path.write_text(PROGRAM)
    job = run_ranks(2, [str(path)], environ={"HVDX_ALLREDUCE": "ring", "HVDX_TIMEOUT": "30"})
    assert job.code == 0, job.output
    refused = "refused: The ranks' reduction algorithms differ: ring, mpi on ranks 0, 1, ... "
    assert job.output.count(refused + "Give all ranks the same HVDX_ALLREDUCE.") == 2
    assert job.output.count("sum [2.0, 2.0, 2.0, 2.0, 2.0]") == 2
    assert job.output.count("sent 64") == 2, "a tree of two sends the buffer once each way; buffers are aligned"
