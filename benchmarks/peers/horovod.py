"""Horovod, on whatever MPI or Gloo its ranks were started with, in its two ways to reduce several tensors.

Its DistributedOptimizer reduces one by one (its background thread fuses them); `grouped_allreduce` is what groups use.
Its background thread wakes every cycle and talks to the other ranks, so the driver stops these ranks between turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as horovod

from benchmarks.peers.graph import arrays, captured, mpi_version
from benchmarks.session import Session, Way
from benchmarks.workloads import Shapes


def start(argument: str) -> Session:
    """Join; the argument is the name of what moves the bytes, for the tables."""
    on_gloo = argument == "Gloo"
    versions = {} if on_gloo else mpi_version()  # mpi4py first: the library that it loads is the one Horovod gets
    horovod.init()
    if on_gloo != bool(horovod.gloo_enabled()):
        raise RuntimeError(f"Horovod was to move bytes by {argument}, and started with the other of MPI and Gloo")

    def ways(shapes: Shapes) -> dict[str, Way]:
        inside = captured(shapes, horovod.rank())
        made = {f"Horovod {argument} (one by one)": Way(_one_by_one(inside), arrays)}
        if len(shapes) > 1:
            made[f"Horovod {argument} (grouped)"] = Way(_grouped(inside), arrays)
        return made

    return Session(horovod.rank(), horovod.size(), ways, horovod.shutdown, versions)


def _grouped(inside: Callable[[], list[Any]]) -> Any:
    import tensorflow as tf

    @tf.function
    def reduce() -> list[Any]:
        return horovod.grouped_allreduce(inside(), op=horovod.Average)

    return reduce


def _one_by_one(inside: Callable[[], list[Any]]) -> Any:
    import tensorflow as tf

    @tf.function
    def reduce() -> list[Any]:
        return [horovod.allreduce(tensor, op=horovod.Average) for tensor in inside()]

    return reduce
