"""Which algorithm is the fastest for how many bytes, as measured: `measured.json`, written by a benchmark.

    hvdxrun -np 4 python -m benchmarks.measure_algorithms --write

Where nothing was measured for an MPI library and a number of ranks on each host, MPI's own all-reduce is used; but
for long buffers of two ranks on two hosts, which need one exchange only, and that in pieces: then other pairs of the
same hosts can use the link as well.
"""

from __future__ import annotations

import bisect
import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("measured.json")
FALLBACK = "mpi"

Thresholds = tuple[tuple[int, ...], tuple[str, ...]]
"""From how many bytes on which algorithm is used, in rising order; the first number is 0."""

_UNMEASURED: dict[tuple[int, ...], Thresholds] = {(1, 1): ((0, 1 << 20), (FALLBACK, "recursive_doubling"))}


def ranks_per_host(hosts: Sequence[int]) -> tuple[int, ...]:
    """Return how many ranks each host has, the largest first."""
    return tuple(sorted(Counter(hosts).values(), reverse=True))


def choose(thresholds: Thresholds, nbytes: int) -> str:
    """Return the algorithm for a buffer of `nbytes`."""
    begins, names = thresholds
    return names[bisect.bisect_right(begins, nbytes) - 1]


@functools.cache
def lookup(library: str, topology: tuple[int, ...], path: Path = PATH) -> Thresholds:
    """Return what was measured with this MPI library (its vendor's name) and these numbers of ranks on the hosts."""
    for row in read(path):
        if row["library"] == library and tuple(row["ranks per host"]) == topology:
            return to_thresholds(row["from bytes"])
    return _UNMEASURED.get(topology, ((0,), (FALLBACK,)))


def read(path: Path = PATH) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def to_thresholds(from_bytes: Mapping[str, str]) -> Thresholds:
    """Return the thresholds of a row."""
    pairs = sorted((int(begin), name) for begin, name in from_bytes.items())
    return tuple(begin for begin, _ in pairs), tuple(name for _, name in pairs)


def write(row: dict[str, Any], path: Path = PATH) -> None:
    """Put a row into the table, in place of the one for the same library and topology."""
    key = (row["library"], row["ranks per host"])
    rows = [other for other in read(path) if (other["library"], other["ranks per host"]) != key]
    rows = sorted([*rows, row], key=lambda one: (one["library"], len(one["ranks per host"]), one["ranks per host"]))
    path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
