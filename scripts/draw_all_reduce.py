"""Draws docs/images/all-reduce-*.svg: `python scripts/draw_all_reduce.py`.

The algorithms themselves run, on threads with a clock; what is drawn are the messages they sent and what their buffers
held. So a drawing cannot differ from the code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.comm.algorithms import ALGORITHMS
from hvdx.comm.algorithms.costs import Cluster, Link
from hvdx.comm.algorithms.simulation import SimulatedChannel, simulate

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
HOSTS = {"hierarchical": [0, 0, 0, 1, 1, 1]}
ONE_HOST = [0, 0, 0, 0]
STEP = Cluster.flat(1, Link(1.0, 0.0))
"""Every message takes one step, however long it is."""

CELL, GAP, ROW, TOP, LEFT = 25, 44, 84, 56, 66
"""Pixels: a cell, between ranks, from a step to the next, above the first, and left of rank 0."""
PALE, FULL = (238, 243, 248), (47, 109, 179)
"""Colours of a cell with one rank's number and with the sum of all."""
ARROW, TEXT, LINE, WHITE = "#c8442c", "#222222", "#8899aa", "#ffffff"


@dataclass(frozen=True)
class Arrow:
    """A message: between whom, in which step, and which numbers of the buffer it carried."""

    source: int
    destination: int
    step: int
    first: int
    count: int


class Recorder(SimulatedChannel):
    """Writes down what is sent, and what the buffer holds from when on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.buffer = np.ones(self.size, np.int64)
        self.arrows: list[Arrow] = []
        self.held: dict[int, list[int]] = {}

    def _move(self, send: np.ndarray, destination: int, receive: np.ndarray, source: int) -> None:
        self.note()
        if send.size:
            first = (send.ctypes.data - self.buffer.ctypes.data) // send.itemsize
            self.arrows.append(Arrow(self.rank, destination, int(self.clock), first, send.size))
        super()._move(send, destination, receive, source)

    def note(self) -> None:
        """Write down what the buffer holds now."""
        self.held[int(self.clock)] = [int(number) for number in self.buffer]

    def at(self, step: int) -> list[int]:
        """Return what the buffer held when a step began: in each place, how many ranks are added up."""
        return self.held[max(time for time in self.held if time <= step)]


def record(name: str) -> list[Recorder]:
    """Run an algorithm with one number a rank in the buffer."""

    def run(channel: Recorder) -> None:
        ALGORITHMS[name].all_reduce(channel.buffer, np.add, channel)
        channel.note()

    _, channels = simulate(HOSTS.get(name, ONE_HOST), run, STEP, Recorder)
    return channels


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw(name: str) -> str:
    """Return the drawing: ranks from left to right, steps from top to bottom."""
    recorders = record(name)
    ranks = len(recorders)
    steps = max(arrow.step for recorder in recorders for arrow in recorder.arrows) + 1
    width, height = _x(ranks, ranks) - GAP + 12, TOP + steps * ROW + CELL + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L10 5 L0 10 z" fill="{ARROW}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="{WHITE}"/>',
        *_heads(HOSTS.get(name), ranks),
    ]
    for step in range(steps + 1):
        parts.append(_text(8, _y(step) + CELL / 2 + 5, f"step {step}" if step else "start", anchor="start"))
        for recorder in recorders:
            parts += _cells(recorder.rank, step, recorder.at(step))
    parts += [_arrow(arrow, ranks) for recorder in recorders for arrow in recorder.arrows]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _heads(hosts: Sequence[int] | None, ranks: int) -> list[str]:
    heads = [_text(_x(rank, ranks) + ranks * CELL / 2, TOP - 12, f"rank {rank}") for rank in range(ranks)]
    for host in sorted(set(hosts or [])):
        own = [rank for rank, of in enumerate(hosts or []) if of == host]
        start, end = _x(own[0], ranks), _x(own[-1], ranks) + ranks * CELL
        heads.append(f'<path d="M{start} 28 L{start} 24 L{end} 24 L{end} 28" fill="none" stroke="{LINE}"/>')
        heads.append(_text((start + end) / 2, 17, f"host {host}"))
    return heads


def _x(rank: int, ranks: int) -> int:
    return LEFT + rank * (ranks * CELL + GAP)


def _y(step: int) -> int:
    return TOP + step * ROW


def _cells(rank: int, step: int, held: Sequence[int]) -> list[str]:
    """Draw a buffer: each number says, and each shade shows, how many ranks are added up there."""
    parts = []
    for place, number in enumerate(held):
        x, y = _x(rank, len(held)) + place * CELL, _y(step)
        dark = (number - 1) / (len(held) - 1)
        shade = "".join(f"{round(pale + dark * (full - pale)):02x}" for pale, full in zip(PALE, FULL, strict=True))
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="#{shade}" stroke="{LINE}"/>')
        parts.append(_text(x + CELL / 2, y + CELL / 2 + 5, str(number), WHITE if number == len(held) else TEXT))
    return parts


def _arrow(arrow: Arrow, ranks: int) -> str:
    """Draw a message from under the numbers that went to above the place where they came."""
    start, end = arrow.first * CELL, (arrow.first + arrow.count) * CELL
    source, destination = _x(arrow.source, ranks), _x(arrow.destination, ranks)
    y1, y2 = _y(arrow.step) + CELL + 3, _y(arrow.step + 1) - 4
    x1, x2 = source + (start + end) / 2, destination + (start + end) / 2
    return (
        f'<path d="M{source + start + 2} {y1} L{source + end - 2} {y1}" stroke="{ARROW}" stroke-width="3"/>'
        f'<path d="M{x1:g} {y1 + 3} L{x2:g} {y2}" stroke="{ARROW}" stroke-width="1.5" marker-end="url(#head)"/>'
    )


def _text(x: float, y: float, text: str, color: str = TEXT, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}">{text}</text>'


def main() -> int:
    """Write the drawings."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in ALGORITHMS:
        path = FOLDER / f"all-reduce-{name.replace('_', '-')}.svg"
        path.write_text(draw(name))
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
