"""What workers do all together through the servers, without variables: reductions, broadcasts, barriers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdx.comm.reduce_op import ReduceOp
from hvdx.distribute.parameter_server.link import Link
from hvdx.distribute.parameter_server.placement import assign
from hvdx.distribute.parameter_server.rounds import FROM_WORKER_0, OF_EVERY_WORKER

_SMALL = 1 << 16
"""Bytes up to which one server alone reduces an array."""


class Collective:
    """The part of a worker's client that needs no registration.

    Args:
        link: the connections.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._servers = range(len(link.addresses))
        self._reductions: dict[str, int] = {}

    def push_pull(
        self, tensors: Sequence[Any], op: ReduceOp | str = ReduceOp.AVERAGE, name: str = "push_pull"
    ) -> list[np.ndarray]:
        """Reduce tensors over all workers through the servers; every worker calls it, in any mode.

        Args:
            tensors: arrays or tensors, of the same shapes and dtypes on every worker.
            op: as for `hvd.allreduce`.
            name: what is reduced; calls of one name pair by their order.

        Raises:
            MismatchError: the workers' calls differ.
            StallError: a worker does not come; names it.
        """
        return self._together([np.asarray(tensor) for tensor in tensors], ReduceOp.of(op).value, name)

    def broadcast(self, tensors: Sequence[Any], name: str = "broadcast") -> list[np.ndarray]:
        """Return worker 0's tensors on every worker; every worker calls it with tensors of the same shapes and dtypes.

        For what is not registered: weights that are not trained, and the state of layers.
        """
        return self._together([np.asarray(tensor) for tensor in tensors], FROM_WORKER_0, name)

    def _together(self, arrays: Sequence[np.ndarray], operation: str, name: str) -> list[np.ndarray]:
        owners = assign([f"{name}:{i}" for i in range(len(arrays))], [a.nbytes for a in arrays], len(self._servers))
        parts = {
            server: [array for array, owner in zip(arrays, owners, strict=True) if owner == server]
            for server in sorted(set(owners)) or [0]
        }
        replies = {server: iter(values) for server, values in self._round(parts, operation, name).items()}
        return [next(replies[owner]) for owner in owners]

    def reduce(self, array: np.ndarray, op: ReduceOp, name: str) -> np.ndarray:
        """Return a 1-d array reduced over all workers; a long one by all servers, each a part of it."""
        spread = array.nbytes > _SMALL
        parts = np.array_split(array, len(self._servers) if spread else 1)
        given = {server: [part] for server, part in enumerate(parts)}
        replies = self._round(given, op.value, f"{name}, by {len(parts)} server(s)")
        return np.concatenate([values[0] for values in replies.values()])

    def gather(self, array: np.ndarray, name: str, spread: bool = True, limit: float | None = None) -> list[np.ndarray]:
        """Return every worker's 1-d array, in the order of workers; their lengths may differ.

        Args:
            array: this worker's.
            name: what is gathered.
            spread: whether all servers take part, the same for all calls of a name; else server 0 alone.
            limit: seconds to wait; HVDX_TIMEOUT where it is None.
        """
        parts = np.array_split(array, len(self._servers) if spread else 1)
        replies = self._round({s: [part] for s, part in enumerate(parts)}, OF_EVERY_WORKER, name, limit)
        return [np.concatenate(own) for own in zip(*replies.values(), strict=True)]

    def _round(
        self, parts: Mapping[int, Sequence[np.ndarray]], operation: str, name: str, limit: float | None = None
    ) -> dict[int, list[np.ndarray]]:
        """Bring arrays to some servers, the same on every worker; return what each has made of all workers'."""
        number = self._reductions[name] = self._reductions.get(name, 0) + 1
        header = {"name": name, "number": number, "op_name": operation}
        requests = [self._link.request(server, "reduce", header, arrays) for server, arrays in parts.items()]
        replies = self._link.wait(requests, limit)
        return {server: reply.arrays for server, reply in zip(parts, replies, strict=True)}

    def leave(self, done: bool, limit: float) -> None:
        """Say goodbye to the servers and close the connections.

        Args:
            done: whether this worker has finished the job, and not only this group.
            limit: seconds to wait for the servers' answers.
        """
        try:
            self._link.wait([self._link.request(server, "leave", {"done": done}) for server in self._servers], limit)
        finally:
            self._link.close()

    def barrier(self) -> None:
        """Wait until every worker has come here."""
        self.push_pull([np.zeros(1, np.int32)], ReduceOp.SUM, "barrier")
