"""Ranks that are threads of one process, with queues between them: any number of them, and a clock for each."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hvdx.comm.algorithms.channel import Channel
from hvdx.comm.algorithms.costs import Cluster

SECONDS = 20
"""The limit on every wait."""

Queues = dict[tuple[int, int], "queue.Queue[tuple[np.ndarray, float]]"]


class ThreadChannel(Channel):
    """Messages are copies in a queue for each pair; each rank's clock shows what a cost model would.

    Args:
        rank: this rank.
        hosts: the number of each rank's host.
        queues: shared by all ranks.
        cluster: what messages and additions cost on the clock.
    """

    def __init__(self, rank: int, hosts: Sequence[int], queues: Queues, cluster: Cluster) -> None:
        super().__init__(rank, hosts)
        self.clock = 0.0
        self._queues = queues
        self._cluster = cluster

    def _move(self, send: np.ndarray, destination: int, receive: np.ndarray, source: int) -> None:
        start = end = self.clock
        if send.size:
            self._queues[self.rank, destination].put((send.copy(), start))
            end = start + self._seconds(send.nbytes, destination)
        if receive.size:
            came, sent_at = self._queues[source, self.rank].get(timeout=SECONDS)
            assert came.dtype == receive.dtype
            assert came.shape == receive.shape
            receive[:] = came
            end = max(end, max(start, sent_at) + self._seconds(receive.nbytes, source))
        self.clock = end

    def _seconds(self, nbytes: int, peer: int) -> float:
        near = self.hosts[peer] == self.hosts[self.rank]
        return (self._cluster.within if near else self._cluster.between).seconds(nbytes)

    def add(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        """Add, and let the clock run."""
        self.clock += self._cluster.per_byte_added * out.nbytes
        np.add(left, right, out=out)


class Ranks:
    """Runs a function on as many threads as there are ranks."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(16)

    def run(
        self, hosts: Sequence[int], function: Callable[[ThreadChannel], Any], cluster: Cluster
    ) -> tuple[list[Any], list[ThreadChannel]]:
        """Return what the function returned on each rank, and the channels; nothing may be left in a queue."""
        ranks = range(len(hosts))
        queues: Queues = {(source, destination): queue.Queue() for source in ranks for destination in ranks}
        channels = [ThreadChannel(rank, hosts, queues, cluster) for rank in range(len(hosts))]
        futures = [self._pool.submit(function, channel) for channel in channels]
        results = [future.result(timeout=2 * SECONDS) for future in futures]
        assert all(waiting.empty() for waiting in queues.values())
        return results, channels

    def stop(self) -> None:
        """End the threads."""
        self._pool.shutdown()
