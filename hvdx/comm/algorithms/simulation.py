"""Ranks that are threads of one process, with queues between them and a clock each: an algorithm without MPI.

The clocks show when each rank is done, as the cost models predict it. The tests compare both, and the drawings of
docs/all-reduce.md are made from it.
"""

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


class SimulatedChannel(Channel):
    """One thread's way to the others.

    Args:
        rank: this rank.
        hosts: the number of each rank's host.
        queues: one for each pair, shared by all ranks.
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
            came, left = self._queues[source, self.rank].get(timeout=SECONDS)
            if came.dtype != receive.dtype or came.shape != receive.shape:
                raise ValueError(f"rank {source} sent {came.shape} {came.dtype}, expected {receive.shape}")
            receive[:] = came
            end = max(end, max(start, left) + self._seconds(receive.nbytes, source))
        self.clock = end

    def _seconds(self, nbytes: int, peer: int) -> float:
        near = self.hosts[peer] == self.hosts[self.rank]
        return (self._cluster.within if near else self._cluster.between).seconds(nbytes)

    def add(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        """Add, and let the clock run."""
        self.clock += self._cluster.per_byte_added * out.nbytes
        np.add(left, right, out=out)


def simulate(
    hosts: Sequence[int],
    function: Callable[[Any], Any],
    cluster: Cluster,
    kind: type[SimulatedChannel] = SimulatedChannel,
) -> tuple[list[Any], list[Any]]:
    """Run a function on as many threads as there are ranks.

    Args:
        hosts: the number of each rank's host.
        function: what every rank does with its channel.
        cluster: what messages and additions cost. Only the links count; ranks do not get in each other's way.
        kind: the channels' class.

    Returns:
        What the function returned on each rank, and the channels.

    Raises:
        RuntimeError: messages were sent that nobody received.
    """
    ranks = range(len(hosts))
    queues: Queues = {(source, destination): queue.Queue() for source in ranks for destination in ranks}
    channels = [kind(rank, hosts, queues, cluster) for rank in ranks]
    with ThreadPoolExecutor(len(hosts)) as pool:
        futures = [pool.submit(function, channel) for channel in channels]
        results = [future.result(timeout=2 * SECONDS) for future in futures]
    lost = [pair for pair, waiting in queues.items() if not waiting.empty()]
    if lost:
        raise RuntimeError(f"Nobody received what was sent from and to {lost}.")
    return results, channels
