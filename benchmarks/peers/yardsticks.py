"""What the others are measured against: raw MPI, the floor that memory sets, and an empty tf.function.

- `raw MPI`: one MPI_Allreduce in place of a packed buffer of as many bytes, without TensorFlow, packing or averaging.
- `memory floor`: one copy of the gradients, as into a fusion buffer, and this rank's share of the additions, 1/N of the
  numbers of all ranks, in pieces that stay in the cache, and scaled. Nothing waits, and no result is read by anybody.
- `memory floor, own share left`: the same, but only what the other ranks need is copied, (N - 1)/N of the gradients.
- `empty tf.function`: a function that returns its tensors as they are, which is what calling it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.peers.graph import captured, mpi_version
from benchmarks.session import Session, Way, gradient
from benchmarks.workloads import Shapes

PIECE = 65536
"""Numbers that are added at a time: 256 KiB."""


def start(argument: str) -> Session:
    """Join by MPI; the argument names the MPI for the tables, and says nothing where it is the usual one."""
    world = MPI.COMM_WORLD
    name = f"raw MPI, {argument}" if argument else "raw MPI"

    def ways(shapes: Shapes) -> dict[str, Way]:
        made = {name: Way(_raw(world, shapes))}
        if not argument:
            made["memory floor"] = Way(_floor(shapes, world.rank, world.size, whole=True))
            made["memory floor, own share left"] = Way(_floor(shapes, world.rank, world.size, whole=False))
            made["empty tf.function"] = Way(_empty(shapes, world.rank))
        return made

    return Session(world.rank, world.size, ways, MPI.Finalize, mpi_version())


def _raw(world: Any, shapes: Shapes) -> Callable[[], None]:
    buffer = np.zeros(sum(int(np.prod(shape)) for shape in shapes), np.float32)

    def reduce() -> None:
        world.Allreduce(MPI.IN_PLACE, buffer)

    return reduce


def _floor(shapes: Shapes, rank: int, size: int, whole: bool) -> Callable[[], None]:
    tensors = [gradient(index, shape, rank).reshape(-1) for index, shape in enumerate(shapes)]
    count = sum(tensor.size for tensor in tensors)
    share = -(-count // size)
    packed = np.zeros(count, np.float32)
    copies = parts(tensors, 0, count if whole else count - share, packed)
    total = np.zeros(share, np.float32)
    mine = parts([packed] if whole else tensors, count - share, count, total)
    others = [np.ones(share, np.float32) for _ in range(size - 1)]
    scale = np.float32(1 / size)

    def move() -> None:
        for source, target in copies:
            np.copyto(target, source)
        done = 0
        for source, target in mine:
            for begin in range(0, source.size, PIECE):
                piece = slice(begin, begin + PIECE)
                out = target[piece]
                there = slice(done + begin, done + begin + out.size)
                np.add(source[piece], others[0][there], out=out)
                for other in others[1:]:
                    np.add(out, other[there], out=out)
                np.multiply(out, scale, out=out)
            done += source.size

    return move


def parts(
    tensors: Sequence[np.ndarray], first: int, last: int, buffer: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the numbers `first` to `last` of all tensors in a row, piece by piece, each with its place in a buffer."""
    parts, start = [], 0
    for tensor in tensors:
        low, high = max(first, start), min(last, start + tensor.size)
        if low < high:
            parts.append((tensor[low - start : high - start], buffer[low - first : high - first]))
        start += tensor.size
    return parts


def _empty(shapes: Shapes, rank: int) -> Any:
    import tensorflow as tf

    inside = captured(shapes, rank)

    @tf.function
    def nothing() -> list[Any]:
        return inside()

    return nothing
