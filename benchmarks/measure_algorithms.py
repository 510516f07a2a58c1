"""Times the reduction algorithms beside MPI's own all-reduce, and writes the table that HVDX_ALLREDUCE=auto uses.

    hvdxrun -np 4 python -m benchmarks.measure_algorithms             # prints a table, writes JSON, Markdown and curves
    hvdxrun -np 4 python -m benchmarks.measure_algorithms --write     # and puts the row into hvdx's own table

Buffers of float32 from 4 B to 64 MB on the ranks it is started on, without TensorFlow. In each round all ways run, one
after the other, in rotating order; a time is that of a call on the slowest rank. A machine that others use gives no
result: then nothing is written, unless --even-if-busy says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import BUSY_LIMIT, busy_before, facts
from benchmarks.summary import quartiles
from hvdx.comm.algorithms import ALGORITHMS, measured
from hvdx.comm.algorithms.over_mpi import MpiChannel, reduce
from hvdx.comm.mpi_library import MPI, finalize
from hvdx.comm.reduce_op import ReduceOp

ROOT = Path(__file__).resolve().parent.parent
SIZES = tuple(4**exponent for exponent in range(1, 14))
WAYS = ("mpi", *ALGORITHMS)
TURN_SECONDS, MOST_CALLS = 0.02, 200
ADVANTAGE = 0.05
"""A way that is faster by a smaller share than this does not replace the one used for the next smaller size."""

Seconds = dict[int, dict[str, list[float]]]
"""Of each round's median call: size in bytes, way, round."""


def measure(channel: MpiChannel, sizes: Sequence[int], rounds: int) -> Seconds:
    """Return the times; collective."""
    found: Seconds = {}
    for nbytes in sizes:
        buffer = np.zeros(nbytes // 4, np.float32)
        calls = {way: _calls(channel, buffer, way) for way in WAYS}
        found[nbytes] = {way: [] for way in WAYS}
        for number in range(rounds):
            for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                found[nbytes][way].append(statistics.median(_time(channel, buffer, way, calls[way])))
    return found


def _calls(channel: MpiChannel, buffer: np.ndarray, way: str) -> int:
    """Return how many calls fill a turn; warms up, too."""
    first = min(_time(channel, buffer, way, 3))
    return int(min(max(TURN_SECONDS / first, 2), MOST_CALLS))


def _time(channel: MpiChannel, buffer: np.ndarray, way: str, calls: int) -> list[float]:
    """Return the seconds of each call on the slowest rank; equal on all ranks."""
    taken = np.empty(calls)
    for call in range(calls):
        channel.comm.Barrier()
        start = time.perf_counter()
        reduce(channel, buffer, ReduceOp.SUM, way)
        taken[call] = time.perf_counter() - start
    channel.comm.Allreduce(MPI.IN_PLACE, taken, MPI.MAX)
    return [float(seconds) for seconds in taken]


# -- what it means -----------------------------------------------------------------------------------------------------


def thresholds(seconds: Seconds) -> dict[str, str]:
    """Return from how many bytes on which way is the fastest, beginning at 0; the switch is half-way between two sizes.

    A way replaces another only where its median is smaller by ADVANTAGE, and the quartiles of both lie apart.
    """
    found: dict[str, str] = {}
    current, before = "mpi", 0
    for size, rounds in sorted(seconds.items()):
        of = {way: quartiles(times) for way, times in rounds.items()}
        best = min(of, key=lambda way: of[way].middle)
        faster = of[best].middle < (1 - ADVANTAGE) * of[current].middle and of[best].high < of[current].low
        chosen = best if faster else current
        if not found or chosen != current:
            found[str(round((before * size) ** 0.5))] = chosen
        current, before = chosen, size
    return found


def size_name(nbytes: int) -> str:
    """Return for example `16 KiB`."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def markdown(title: str, seconds: Seconds) -> str:
    """Return the table: microseconds, median and quartiles; the fastest of each size in bold."""
    lines = [f"{title}; microseconds, median [quartiles]:", "", f"| bytes | {' | '.join(WAYS)} |"]
    lines.append("|---|" + "---|" * len(WAYS))
    for size, of in seconds.items():
        times = {way: quartiles([1e6 * value for value in of[way]]) for way in WAYS}
        best = min(times, key=lambda way: times[way].middle)
        cells = [f"{t.middle:.3g} [{t.low:.3g}, {t.high:.3g}]" for t in times.values()]
        cells = [f"**{cell}**" if way == best else cell for way, cell in zip(WAYS, cells, strict=True)]
        lines.append(f"| {size_name(size)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def curves(title: str, seconds: Seconds, path: Path) -> None:
    """Draw time over size, both logarithmic, with the quartiles as bands.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "hvdx"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5))
    for way, marker in zip(WAYS, "os^Dv*", strict=True):
        times = [quartiles([1e6 * value for value in of[way]]) for of in seconds.values()]
        [line] = axes.plot(list(seconds), [t.middle for t in times], marker=marker, markersize=4, label=way)
        axes.fill_between(
            list(seconds), [t.low for t in times], [t.high for t in times], color=line.get_color(), alpha=0.15
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(seconds), [size_name(size) for size in seconds], rotation=45, fontsize=8)
    axes.set_xlabel("bytes of the buffer")
    axes.set_ylabel("microseconds (band: quartiles)")
    axes.set_title(title, fontsize=10)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


# -- running it --------------------------------------------------------------------------------------------------------


def report(channel: MpiChannel, seconds: Seconds, busy: float, options: argparse.Namespace) -> None:
    """Print and write what was found; on rank 0."""
    topology = measured.ranks_per_host(channel.hosts)
    machine = facts()
    library = MPI.get_vendor()[0]
    row = {
        "library": library,
        "ranks per host": list(topology),
        "measured": f"{machine['date']}, {machine['processor']}, {machine['cores']} cores",
        "from bytes": thresholds(seconds),
    }
    where = "1 host" if len(topology) == 1 else f"{len(topology)} hosts"
    version = ".".join(map(str, MPI.get_vendor()[1]))
    title = (
        f"{library} {version}, {where} x {'+'.join(map(str, sorted(set(topology))))} ranks, {machine['cores']} cores"
    )
    text = markdown(title, seconds)
    print(text)
    print(f"auto: {row['from bytes']}")
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / f"algorithms-{library.lower().replace(' ', '')}-{'-'.join(map(str, topology))}"
    stem.with_suffix(".md").write_text(text)
    curves(title, seconds, stem.with_suffix(".svg"))
    whole = {"machine": machine, "busy before": busy, "row": row, "seconds": seconds}
    stem.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    print(f"wrote {stem}.md, .svg and .json")
    if options.write:
        measured.write(row)
        print(f"wrote the row to {measured.PATH}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on this rank; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds, in each of which all ways run (default 9)")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest buffer (default 64 MiB)")
    parser.add_argument("--write", action="store_true", help="put the row into the table that auto chooses from")
    parser.add_argument("--even-if-busy", action="store_true", help="measure although others use the machine")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the files")
    options = parser.parse_args(argv)
    comm: Any = MPI.COMM_WORLD
    comm.Barrier()
    busy = comm.bcast(busy_before())  # on every rank: one that waited for the answer would be busy itself
    try:
        if busy > BUSY_LIMIT and not options.even_if_busy:
            if comm.Get_rank() == 0:
                print(
                    f"Others use {100 * busy:.0f} % of this machine: what is measured now is no result.",
                    file=sys.stderr,
                )
            return 3
        channel = MpiChannel(comm.Dup(), comm.allgather(MPI.Get_processor_name()))
        seconds = measure(channel, [size for size in SIZES if size <= options.largest], options.rounds)
        if channel.rank == 0:
            report(channel, seconds, busy, options)
        comm.Barrier()
        return 0
    finally:
        finalize()


if __name__ == "__main__":
    sys.exit(main())
