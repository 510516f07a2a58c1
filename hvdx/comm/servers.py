"""The communicator of the workers of a job with parameter servers: what ranks exchange goes through the servers.

Workers are the ranks; servers are none. No worker waits for another one at its end, since in asynchronous training they
finish at different times; who waits for a worker that is gone hears so from the servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hvdx import environment
from hvdx.comm.agreement import Waiting
from hvdx.comm.communicator import Topology
from hvdx.comm.host import HostCommunicator
from hvdx.comm.reduce_op import ReduceOp
from hvdx.distribute.parameter_server.collective import Collective
from hvdx.distribute.server_job import WorkerJob
from hvdx.errors import CollectiveError, HvdxError, StallError, UnsupportedError


class ServersCommunicator(HostCommunicator):
    """Every exchange is one round trip of each worker to the servers, which put the workers' parts together.

    Args:
        job: this worker's part in the job.
    """

    name: ClassVar[str] = "servers"

    def __init__(self, job: WorkerJob) -> None:
        super().__init__()
        self.job = job
        self.topology = Topology.from_hosts(job.worker, job.hosts)
        self._servers = Collective(job.link("communicator"))
        self._gather_rows("the start of hvdx", np.zeros(1, np.int64), environment.START_TIMEOUT.read())

    def _gather_rows(self, what: str, row: np.ndarray, limit: float) -> np.ndarray:
        try:
            return np.stack(self._servers.gather(row, "rows", spread=False, limit=limit))
        except HvdxError as error:
            raise StallError(f"{what}: {error}") from error

    def _exchange(self, row: np.ndarray, waiting: Waiting) -> np.ndarray:
        return self._gather_rows(waiting.signature.describe(), row, waiting.limit)

    def _reduce(self, buffer: np.ndarray, op: ReduceOp) -> None:
        if buffer.size:
            buffer[:] = self._moved(lambda: self._servers.reduce(buffer, op, "reduce"))

    def _reduce_half(self, values: np.ndarray, op: ReduceOp) -> None:
        """Reduce 16-bit floats in place: the servers accumulate 32 bits, in the order of workers."""
        self._reduce(values, op)

    def _gather(self, part: np.ndarray, counts: Sequence[int], result: np.ndarray) -> None:
        result[:] = np.concatenate(self._moved(lambda: self._servers.gather(part, "gather")))

    def _alltoall(self, parts: np.ndarray, result: np.ndarray) -> None:
        rows = self._moved(lambda: self._servers.gather(parts.reshape(-1), "all to all"))
        result[:] = [row.reshape(parts.shape)[self.topology.rank] for row in rows]

    def _bcast(self, buffer: np.ndarray, root: int) -> None:
        own = buffer if root == self.topology.rank else buffer[:0]
        buffer[:] = self._moved(lambda: self._servers.gather(own, "broadcast"))[root]

    def _moved(self, move: Any) -> Any:
        """Return what `move` returns; no collective can follow one that failed in the midst of it."""
        try:
            return move()
        except HvdxError as error:
            self._agreement.error = CollectiveError(f"The servers failed in {self._agreement.last}: {error}")
            raise self._agreement.error from error

    def send(self, tensor: Any, destination: int, tag: int) -> Any:
        raise UnsupportedError(_NO_MESSAGES)

    def recv(self, dtype: Any, shape: Any, source: int, tag: int) -> Any:
        raise UnsupportedError(_NO_MESSAGES)

    def close(self, clean: bool) -> bool:
        self.job.end(self._servers if clean else None)
        return True


_NO_MESSAGES = (
    "Workers of a job with parameter servers send no messages to each other. Use hvd.broadcast or hvd.allgather, or "
    "start without --servers."
)
