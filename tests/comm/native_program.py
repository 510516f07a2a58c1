"""What the tests of native communicators start on several ranks: `native_program.py SCENE`, a fault or a start."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import hvdx as hvd


def stop_rank_1() -> None:
    """Stop rank 1, after what it still has to send of the last collective has left."""
    if hvd.rank() == 1:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGSTOP)


def stop(tf: Any) -> None:
    """Rank 1 is stopped before a collective."""
    stop_rank_1()
    hvd.allreduce(tf.ones([3]), name="weights")


def stop_in_graph(tf: Any) -> None:
    """The same, where the collective is in a graph."""
    stop_rank_1()
    tf.function(lambda: hvd.allreduce(tf.ones([3]), name="weights"))()


def stop_in_payload(tf: Any) -> None:
    """Rank 1 is stopped in the middle of a large payload."""
    communicator: Any = hvd.world.communicator()
    if hvd.rank() == 1:

        def begin(signature: Any) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

        communicator._monitor.begin = begin  # right after the ranks have agreed
    hvd.allreduce(tf.ones([20_000_000]), name="weights")


def error(tf: Any) -> None:
    """Rank 1 fails while rank 0 waits."""
    if hvd.rank() == 1:
        raise ValueError("a mistake in the program")
    hvd.allreduce(tf.ones([3]))


def death(tf: Any) -> None:
    """Rank 1 disappears while rank 0 waits."""
    if hvd.rank() == 1:
        os._exit(7)
    hvd.allreduce(tf.ones([3]))


def leave_early(tf: Any) -> None:
    """Rank 1 ends its program while rank 0 waits."""
    if hvd.rank() == 0:
        hvd.allreduce(tf.ones([3]))


def exit_code(tf: Any) -> None:
    """All ranks end with a code of their own."""
    sys.exit(3)


def again(tf: Any) -> None:
    """The world is left and joined again."""
    for turn in range(3):
        hvd.shutdown()
        hvd.init()
        assert hvd.allgather_object((hvd.rank(), turn)) == [(rank, turn) for rank in range(hvd.size())]


def nothing(tf: Any) -> None:
    """Everything goes well."""


def check(tf: Any) -> None:
    """The world works."""
    total = hvd.allreduce(tf.fill([5], float(hvd.rank() + 1)), hvd.Sum).numpy().tolist()
    assert total == [hvd.size() * (hvd.size() + 1) / 2] * 5, total


def main() -> None:
    """Join, play the scene, say that all is well."""
    scene = sys.argv[1]
    if scene == "too_late":
        import tensorflow as tf

        tf.ones([1])
    hvd.init()
    import tensorflow as tf

    check(tf)
    print(f"rank {hvd.rank()} of {hvd.size()} by {hvd.world.communicator().name}, pid {os.getpid()}", flush=True)
    hvd.barrier()
    scenes = (stop, stop_in_graph, stop_in_payload, error, death, leave_early, exit_code, again, nothing)
    {known.__name__: known for known in scenes}[scene](tf)
    print(f"rank {hvd.rank()} ends, TF_CONFIG {os.environ.get('TF_CONFIG', 'not set')}", flush=True)


if __name__ == "__main__":
    main()
