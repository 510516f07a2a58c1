"""What workers do all together through the servers, without variables: reductions, broadcasts, barriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdx.comm.reduce_op import ReduceOp
from hvdx.distribute.parameter_server.link import Link
from hvdx.distribute.parameter_server.placement import assign
from hvdx.distribute.parameter_server.rounds import FROM_WORKER_0


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
        number = self._reductions[name] = self._reductions.get(name, 0) + 1
        header = {"name": name, "number": number, "op_name": operation}
        used = sorted(set(owners)) or [0]
        requests = [
            self._link.request(
                server, "reduce", header, [a for a, owner in zip(arrays, owners, strict=True) if owner == server]
            )
            for server in used
        ]
        replies = dict(zip(used, (iter(reply.arrays) for reply in self._link.wait(requests)), strict=True))
        return [next(replies[owner]) for owner in owners]

    def barrier(self) -> None:
        """Wait until every worker has come here."""
        self.push_pull([np.zeros(1, np.int32)], ReduceOp.SUM, "barrier")
