"""What the others are measured against: raw MPI, the floor that memory sets, and an empty tf.function.

- `raw MPI`: one MPI_Allreduce in place of a packed buffer of as many bytes, without TensorFlow, packing or averaging.
- `memory floor`: what no reduction can do without: one copy of the gradients into a buffer, and this rank's share of
  the additions, 1/N of the numbers of each of the other ranks, in pieces that stay in the cache, scaled. No waiting.
- `empty tf.function`: a function that returns its tensors as they are, which is what calling it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.peers.graph import arrays, captured, mpi_version
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
            made["memory floor"] = Way(_floor(shapes, world.rank, world.size))
            made["empty tf.function"] = Way(_empty(shapes, world.rank))
        return made

    return Session(world.rank, world.size, ways, MPI.Finalize, mpi_version())


def _raw(world: Any, shapes: Shapes) -> Callable[[], None]:
    buffer = np.zeros(sum(int(np.prod(shape)) for shape in shapes), np.float32)

    def reduce() -> None:
        world.Allreduce(MPI.IN_PLACE, buffer)

    return reduce


def _floor(shapes: Shapes, rank: int, size: int) -> Callable[[], None]:
    tensors = [gradient(index, shape, rank).reshape(-1) for index, shape in enumerate(shapes)]
    packed = np.zeros(sum(tensor.size for tensor in tensors), np.float32)
    ends = np.cumsum([tensor.size for tensor in tensors])
    places = [packed[end - tensor.size : end] for tensor, end in zip(tensors, ends, strict=True)]
    share = -(-packed.size // size)
    mine = packed[rank * share : (rank + 1) * share]
    others = [np.ones(mine.size, np.float32) for _ in range(size - 1)]
    total = np.zeros(mine.size, np.float32)
    scale = np.float32(1 / size)

    def move() -> None:
        for place, tensor in zip(places, tensors, strict=True):
            np.copyto(place, tensor)
        for begin in range(0, mine.size, PIECE):
            piece = slice(begin, begin + PIECE)
            np.multiply(mine[piece], scale, out=total[piece])
            for other in others:
                np.add(total[piece], other[piece], out=total[piece])

    return move


def _empty(shapes: Shapes, rank: int) -> Any:
    import tensorflow as tf

    inside = captured(shapes, rank)

    @tf.function
    def nothing() -> list[Any]:
        return inside()

    arrays(nothing())
    return nothing
