"""Jobs that share memory: where it is not to be had, what is left of it, several hosts, and a rank that only waits."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import HVDXRUN
from tests.launch.two_hosts import PORT, TwoHosts
from tests.support.jobs import ROOT, processes_with, run_ranks

SUMS = """
import os, resource, sys, time
from mpi4py import MPI
import mpi4py
import numpy as np
import tensorflow as tf
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
import hvdx as hvd
hvd.init()
communicator = hvd.world.communicator()
rank, size = hvd.rank(), hvd.size()
half = tf.function(lambda x: hvd.allreduce(x, hvd.Average, compression=hvd.Compression.bf16))
for count in (5, 100_000, 3_000_001):
    x = np.arange(count) % 11 + rank
    total = size * (np.arange(count) % 11) + sum(range(size))
    for dtype in ("float32", "int32"):
        y = tf.function(lambda t: hvd.allreduce(t, hvd.Sum))(tf.constant(x.astype(dtype)))
        np.testing.assert_array_equal(y, total.astype(dtype))
        y = hvd.allreduce(tf.constant(x.astype(dtype)))
        np.testing.assert_allclose(y, np.trunc(total / size) if dtype == "int32" else total / size, rtol=1e-6)
    largest = hvd.allreduce(tf.constant(x.astype("float32")), hvd.Max)
    np.testing.assert_array_equal(largest, np.arange(count) % 11 + size - 1)
    np.testing.assert_allclose(half(tf.constant(x.astype("float32"))), total / size, rtol=2e-2)
def of(r, count, dtype):
    return (np.arange(count) % 3 + r % 2).astype(dtype)
for dtype, op, put in (("float16", hvd.Sum, np.sum), ("int8", hvd.Min, np.min), ("bool", hvd.Max, np.max),
                       ("complex64", hvd.Average, np.mean), ("float64", hvd.Product, np.prod),
                       ("uint16", hvd.Average, np.mean)):
    counts = (200_003, 0, 90_001, 1)
    sums = tf.function(lambda: hvd.grouped_allreduce([tf.constant(of(rank, n, dtype)) for n in counts], op,
                                                     fusion_threshold=1 << 18))()
    for result, n in zip(sums, counts):
        wanted = put(np.stack([of(r, n, dtype) for r in range(size)]), axis=0)
        np.testing.assert_allclose(result, wanted.astype(dtype), rtol=1e-6, err_msg=dtype)
np.testing.assert_array_equal(hvd.allgather(tf.fill([rank + 1], rank)), np.repeat(range(size), np.arange(size) + 1))
print("right", rank, communicator.name, hvd.local_rank(), hvd.local_size())
"""

YIELD = "OMPI_MCA_mpi_yield_when_idle=1"
"""Two hosts share the cores here, and Open MPI, which does not know, would spin on those that others need."""


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "sums_program.py"
    path.write_text(SUMS)
    return path


@pytest.mark.parametrize(
    ("limit", "name", "text"),
    [
        (1000, "mpi", "Ranks of a host cannot share memory (on "),
        (4 << 20, "shared_memory", "There is not enough shared memory for 12,000,"),
    ],
)
def test_without_memory_to_share_bytes_travel_by_mpi_and_one_line_says_so(
    sums: Path, limit: int, name: str, text: str
) -> None:
    """A real limit of the process: none at all, or enough for the start and not for the largest tensor."""
    job = run_ranks(2, [str(sums), str(limit)])
    assert job.code == 0, job.output
    assert all(f"right {rank} {name}" in job.output for rank in range(2)), job.output
    lines = [line for line in job.output.splitlines() if text in line]
    assert len(lines) == 1, job.output
    assert "File too large" in lines[0]


@pytest.mark.parametrize("placed", ["hosta:2,hostb:2", "hosta:3,hostb:1"])
def test_two_hosts_exchange_slices(sums: Path, hosts: TwoHosts, placed: str) -> None:
    """Namespaces stand for the hosts: names and networks of their own, ranks started by ssh."""
    output = _on_two_hosts(hosts, placed, str(sums), "0")
    on_first = int(placed[6])
    for rank in range(4):
        local, size = (rank, on_first) if rank < on_first else (rank - on_first, 4 - on_first)
        assert f"right {rank} shared_memory {local} {size}" in output, output


def _on_two_hosts(hosts: TwoHosts, placed: str, *program: str) -> str:
    """Run a program on four ranks, and return what it printed."""
    options = {"-p": str(PORT), "-i": hosts.key, "-np": "4", "-H": placed}
    line = [word for option in options.items() for word in option]
    line += ["-x", "PYTHONPATH", "-x", YIELD.partition("=")[0], sys.executable, *program]
    done = subprocess.run(
        hosts.on("hosta", ["env", f"PYTHONPATH={ROOT}", YIELD, *HVDXRUN, *line]),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


FIT = """
import keras, numpy as np
import hvdx as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
random = np.random.default_rng(1)
x, y = random.normal(size=(64, 300)).astype("float32"), random.normal(size=(64, 1)).astype("float32")
def trained(optimizer, rows):
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(700, "tanh") for _ in range(4)]
    model = keras.Sequential([keras.Input([300]), *layers, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(x[rows], y[rows], batch_size=16 // (64 // len(x[rows])), epochs=2, shuffle=False, verbose=0)
    return model.get_weights()
communicator, calls = hvd.world.communicator(), []
reduce = communicator.grouped_allreduce
communicator.grouped_allreduce = lambda tensors, *rest: (calls.append(len(tensors)), reduce(tensors, *rest))[1]
# of each batch of 16, this rank's rows
mine = np.concatenate([np.arange(start + rank, start + 16, size) for start in range(0, 64, 16)])
weights = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.001, momentum=0.9)), mine)
assert len(calls) > 1 and sum(calls) % 10 == 0 and max(calls) < 10, calls
everybody = hvd.allgather_object([weight.tobytes() for weight in weights])
assert all(other == everybody[0] for other in everybody)
for weight, alone in zip(weights, trained(keras.optimizers.SGD(0.001, momentum=0.9), np.arange(64))):
    np.testing.assert_allclose(weight, alone, atol=1e-5)
print("equal", rank, communicator.name, calls)
"""


def test_two_hosts_train_in_buckets_as_one_process(tmp_path: Path, hosts: TwoHosts) -> None:
    """Gradients of 6 MB leave while others are still computed, which is the default between hosts."""
    program = tmp_path / "fit_program.py"
    program.write_text(FIT)
    output = _on_two_hosts(hosts, "hosta:2,hostb:2", str(program))
    assert all(f"equal {rank} shared_memory" in output for rank in range(4)), output


def test_killed_ranks_leave_no_memory(tmp_path: Path) -> None:
    program = tmp_path / "killed_program.py"
    program.write_text(
        "import os, pathlib, signal, threading\nimport tensorflow as tf\nimport hvdx as hvd\nhvd.init()\n"
        "x = tf.ones([5_000_000])\nhvd.allreduce(x)\n"
        "for file in pathlib.Path('/proc/self/fd').iterdir():\n"
        "    if os.path.lexists(file) and 'memfd:hvdx' in os.readlink(file):\n"
        "        print('open memory', file.stat().st_ino)\n"
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "while True:\n    hvd.allreduce(x)\n"
    )
    shared = set(Path("/dev/shm").iterdir())
    job = run_ranks(2, [str(program)], environ={"HVDX_COMM": "shared_memory"})
    assert job.code == 137, job.output
    numbers = {int(number) for number in re.findall(r"open memory (\d+)", job.output)}
    assert len(numbers) > 2, job.output
    end = time.monotonic() + 10
    while processes_with(str(program)) and time.monotonic() < end:
        time.sleep(0.1)
    assert processes_with(str(program)) == []
    left = [path.name for path in set(Path("/dev/shm").iterdir()) - shared if "hvdx" in path.name]
    assert left == []
    assert _open_memory(numbers) == []


def _open_memory(numbers: set[int]) -> list[str]:
    """Return which process of this machine still has one of some memory files open, told by their inodes' numbers."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if "memfd:hvdx" in str(link.readlink()) and link.stat().st_ino in numbers:
                found.append(str(link))
    return found


@pytest.mark.parametrize("comm", ["shared_memory", "mpi"])
def test_who_joins_again_keeps_nothing_open_and_old_functions_say_so(tmp_path: Path, comm: str) -> None:
    program = tmp_path / "again_program.py"
    program.write_text(
        "import gc, os, pathlib\nimport tensorflow as tf\nimport hvdx as hvd\n"
        "def count():\n"
        "    names = [os.readlink(f) for f in pathlib.Path('/proc/self/fd').iterdir() if os.path.lexists(f)]\n"
        "    return len([name for name in names if 'memfd:hvdx' in name or 'eventfd' in name])\n"
        "for turn in range(3):\n    hvd.init()\n    f = tf.function(lambda x: hvd.allreduce(x, hvd.Sum))\n"
        "    print('sum', f(tf.ones([200_000])).numpy()[7])\n    hvd.shutdown()\n"
        "    if turn == 0:\n        first, files = f, count()\n"
        "hvd.init()\n"
        "try:\n    first(tf.ones([200_000]))\nexcept Exception as error:\n    print('old:', error)\n"
        "hvd.shutdown()\ndel f\ngc.collect()\nprint('more:', max(0, count() - files))\n"
    )
    job = run_ranks(2, [str(program)], environ={"HVDX_COMM": comm})
    assert job.code == 0, job.output
    assert job.output.count("sum 2.0") == 6, job.output
    assert job.output.count("hvd.shutdown() has ended the world") >= 2, job.output
    assert job.output.count("more: 0") == 2, job.output


def test_a_call_that_is_broken_off_is_never_taken_for_done(tmp_path: Path) -> None:
    """Rank 0 is interrupted while it adds, and goes on: rank 1 must not take what comes next for the end of the sum."""
    program = tmp_path / "broken_program.py"
    program.write_text(
        "import time\nimport tensorflow as tf\nimport hvdx as hvd\nhvd.init()\nc = hvd.world.communicator()\n"
        "x = tf.fill([200_000], float(hvd.rank() + 1))\n"
        "def interrupted(*_):\n    raise KeyboardInterrupt('by hand')\n"
        "if hvd.rank() == 0:\n    c._add_run = interrupted\n"
        "for turn in range(2):\n    try:\n        print('came', hvd.allreduce(x, hvd.Sum).numpy()[-1])\n"
        "    except BaseException as error:\n        print('raised', type(error).__name__, error, flush=True)\n"
        "time.sleep(0 if hvd.rank() else 12)\n"
    )
    job = run_ranks(2, [str(program)], environ={"HVDX_COMM": "shared_memory", "HVDX_TIMEOUT": "5"})
    assert "came" not in job.output, job.output
    assert "raised KeyboardInterrupt by hand" in job.output
    assert "KeyboardInterrupt broke off allreduce (Sum) of 1 tensor(s)" in job.output
    assert "raised StallError rank 0 did not come to" in job.output


def test_a_rank_that_waits_uses_no_core(tmp_path: Path) -> None:
    """Rank 0 sleeps for four seconds; the time on a processor is counted by the system for all of rank 1's threads."""
    program = tmp_path / "idle_program.py"
    program.write_text(
        "import time\nimport tensorflow as tf\nimport hvdx as hvd\nhvd.init()\nx = tf.ones([3_000_000])\n"
        "f = tf.function(lambda: hvd.allreduce(x))\nf()\nhvd.barrier()\n"
        "start = time.process_time()\nif hvd.rank() == 0:\n    time.sleep(4)\nf()\n"
        "print('used', hvd.rank(), round(time.process_time() - start, 3))\n"
    )
    job = run_ranks(2, [str(program)], environ={"HVDX_COMM": "shared_memory"})
    assert job.code == 0, job.output
    seconds = [float(line.split()[-1]) for line in job.output.splitlines() if "used 1 " in line]
    assert len(seconds) == 1, job.output
    assert seconds[0] < 0.4, job.output
