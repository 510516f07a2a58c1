"""TensorFlow's own RING collectives, as MultiWorkerMirroredStrategy uses them for a batch of gradients."""

from __future__ import annotations

import json
import os
from typing import Any

from benchmarks.peers.graph import arrays, captured
from benchmarks.session import Session, Way
from benchmarks.workloads import Shapes

HEARTBEAT_SECONDS = 3600
"""Between turns nothing is sent for long."""


def start(argument: str) -> Session:
    """Join the workers that TF_CONFIG lists."""
    strategy = make_strategy()
    workers, rank = place()

    def ways(shapes: Shapes) -> dict[str, Way]:
        return {"TensorFlow RING": Way(_reduction(strategy, shapes, rank, workers), arrays)}

    return Session(rank, workers, ways)


def place() -> tuple[int, int]:
    """Return the number of workers, and which one this is."""
    config = json.loads(os.environ["TF_CONFIG"])
    return len(config["cluster"]["worker"]), int(config["task"]["index"])


def make_strategy() -> Any:
    """Return a strategy between the workers of TF_CONFIG that waits for them as long as a benchmark takes."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    workers, _ = place()
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * HEARTBEAT_SECONDS,
        coordinated_jobs=[context.coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=workers)],
    )
    return tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
    )


def _reduction(strategy: Any, shapes: Shapes, rank: int, workers: int) -> Any:
    import tensorflow as tf

    inside = captured(shapes, rank)

    def replica() -> list[Any]:
        reduced = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, inside())
        return list(reduced)

    @tf.function
    def reduce() -> Any:
        return strategy.run(replica)

    def run() -> Any:
        result = reduce()
        for tensor in result[:1]:
            tensor.numpy()  # the call may return before the collective has ended
        return result

    return run
