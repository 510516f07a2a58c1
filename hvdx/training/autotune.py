"""Trying, in the first updates, in how many buckets gradients travel and by which algorithm; the fastest way stays."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx import environment, world
from hvdx.comm.operation import in_turn
from hvdx.logs import log

UPDATES = 5
"""Updates that are timed for each way, after one that is not."""
BUCKETS = (0, 4 << 20, 16 << 20, 64 << 20)
"""Bytes of a bucket; 0 stands for all gradients in one operation, which begins when the last of them is there."""


class Tuner:
    """The search of one optimizer. All ranks make the same updates, so all try the same way at a time.

    First the algorithms of the communicator are tried, with all gradients in one operation, then sizes of buckets with
    the fastest of them. What counts is the time from one update to the next, on the slowest rank.
    """

    def __init__(self) -> None:
        self._bucket = 0
        self._algorithm = ""
        self._ways: list[tuple[int, str]] | None = None
        self._medians: list[float] = []
        self._measured: list[tuple[float, tuple[int, str]]] = []
        self._samples: list[float] = []
        self._last: float | None = None
        self._updates = 0
        self.report: dict[str, Any] = {}
        """What was measured and chosen; empty until then."""

    def reduce(self, exchange: Callable[[int], list[Any]]) -> list[Any]:
        """Return what `exchange` makes of the gradients, in the way that is to be tried or has been chosen; collective.

        Nothing is tried where TensorFlow is eager, and in a session's graph, which is ordered in another way.

        Args:
            exchange: sends them, given the bytes of a bucket.
        """
        if tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions():
            return exchange(0)
        # The same sizes for all gradients: what a rank has traced when must not decide what is tried.
        number = in_turn(lambda: np.int32(self._next()), [], tf.int32)
        number.set_shape([])
        ways = [self._way(exchange, size) for size in BUCKETS]
        return list(tf.nest.flatten(tf.switch_case(number, ways)))

    @staticmethod
    def _way(exchange: Callable[[int], list[Any]], size: int) -> Callable[[], list[Any]]:
        return lambda: exchange(size)

    def _next(self) -> int:
        """Count an update; return the number of the size of buckets it uses."""
        now = time.perf_counter()
        if not self.report:
            self._count(now)
        self._last = now
        return BUCKETS.index(self._bucket)

    def _count(self, now: float) -> None:
        communicator = world.communicator()
        if self._ways is None:
            # what was asked for by name is not tried
            algorithms = () if environment.ALLREDUCE.source() else communicator.algorithms
            self._ways = [(0, algorithm) for algorithm in algorithms or ("",)]
            self._begin()
        self._updates += 1
        if self._last is not None:
            self._samples.append(now - self._last)
        if len(self._samples) < UPDATES + 1:
            return
        self._medians.append(statistics.median(self._samples[1:]))
        self._samples = []
        if len(self._medians) < len(self._ways):
            self._begin()
        else:
            self._choose()

    def _begin(self) -> None:
        """Let the next way be used."""
        assert self._ways is not None
        self._use(*self._ways[len(self._medians)])

    def _use(self, bucket: int, algorithm: str) -> None:
        self._bucket, self._algorithm = bucket, algorithm
        if algorithm:
            world.communicator().use_algorithm(algorithm)

    def _choose(self) -> None:
        """Agree on the fastest of the ways tried, and go on with what is left to try; collective."""
        assert self._ways is not None
        communicator = world.communicator()
        told = [json.loads(row) for row in communicator.allgather_bytes(json.dumps(self._medians).encode(), _WHAT)]
        slowest = np.max(np.array(told), axis=0).tolist()
        self._measured += zip(slowest, self._ways, strict=True)
        best = min(self._measured)[1]
        self._use(*best)
        if any(bucket for bucket, _ in self._ways):
            self._finish(communicator)
            return
        self._ways = [(size, best[1]) for size in BUCKETS if size]
        self._medians, self._samples, self._last = [], [], None
        self._begin()

    def _finish(self, communicator: Any) -> None:
        chosen = _name((self._bucket, self._algorithm))
        seconds = {_name(way): seconds for seconds, way in self._measured}
        self.report = {"chosen": chosen, "updates": self._updates, "seconds": seconds}
        if communicator.topology.rank == 0:
            times = "; ".join(f"{name}: {1e3 * each:.1f}" for name, each in seconds.items())
            log.warning("autotune chose %s after %d updates. Milliseconds from update to update: %s.",
                        chosen, self._updates, times)  # fmt: skip


_WHAT = "times of autotune"


def _name(way: tuple[int, str]) -> str:
    bucket, algorithm = way
    size = f"buckets of {bucket:,} bytes" if bucket else "one operation"
    return f"{size} by {algorithm}" if algorithm else size
