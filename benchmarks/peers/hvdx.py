"""hvdx on one of its communicators: `hvd.grouped_allreduce` of all tensors in a tf.function."""

from __future__ import annotations

from typing import Any

import hvdx as hvd
from benchmarks.peers.graph import arrays, captured, mpi_version
from benchmarks.session import Session, Way
from benchmarks.workloads import Shapes


def start(argument: str) -> Session:
    """Join on the communicator that is named."""
    hvd.init(argument)
    versions = mpi_version() if argument in {"mpi", "shared_memory", "horovod"} else {}

    def ways(shapes: Shapes) -> dict[str, Way]:
        return {f"hvdx {argument}": Way(_reduction(shapes), arrays)}

    return Session(hvd.rank(), hvd.size(), ways, hvd.shutdown, versions)


def _reduction(shapes: Shapes) -> Any:
    import tensorflow as tf

    inside = captured(shapes, hvd.rank())

    @tf.function
    def reduce() -> list[Any]:
        return hvd.grouped_allreduce(inside(), op=hvd.Average)

    return reduce
