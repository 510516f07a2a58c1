"""Reductions that all workers take part in, gathered by one server: `push_pull`, barriers, tests for infinities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdx.comm.reduce_op import ReduceOp
from hvdx.distribute.parameter_server.clocks import named
from hvdx.distribute.parameter_server.reduction import reduced
from hvdx.distribute.parameter_server.request import Request
from hvdx.errors import HvdxError, MismatchError, WorldError

FROM_WORKER_0 = "that of worker 0"
"""The operation of a broadcast, beside the names of reductions."""
OF_EVERY_WORKER = "that of every worker"
"""The operation of a gather: the arrays of all workers, in their order; those may differ in shape."""


@dataclass
class _Round:
    number: int
    requests: dict[int, Request] = field(default_factory=dict)
    result: list[np.ndarray] | None = None


class Rounds:
    """The reductions of one group on one server.

    Args:
        workers: how many take part.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._rounds: dict[str, _Round] = {}
        self._gone: dict[int, str] = {}

    def join(self, request: Request) -> None:
        """Take a worker's part; all are answered when the last one has come."""
        name, number = request.header["name"], int(request.header["number"])
        current = self._rounds.get(name)
        if current is None or (number == current.number + 1 and current.result is not None):
            current = self._rounds[name] = _Round(number)
        if number != current.number:
            request.fail(
                MismatchError(
                    f"Worker {request.worker} makes its reduction number {number} of {name!r}, and others number "
                    f"{current.number}: every worker must call it equally often."
                )
            )
            return
        if current.result is not None:  # the answer was lost on its way
            request.answer({}, current.result)
            return
        current.requests[request.worker] = request
        if self._gone.keys() - current.requests.keys():
            self._fail(current)
            return
        if len(current.requests) < self._workers:
            missing = named(set(range(self._workers)) - set(current.requests))
            for waiting in current.requests.values():
                waiting.waits_for = f"{missing} in the reduction of {name!r}"
            return
        self._complete(name, current)

    def _complete(self, name: str, current: _Round) -> None:
        ordered = [current.requests[worker] for worker in sorted(current.requests)]
        try:
            current.result = _reduced(name, ordered)
        except HvdxError as error:
            current.result = []
            for request in ordered:
                request.fail(error)
            return
        for request in ordered:
            request.answer({}, current.result)
        current.requests = {}

    def leave(self, worker: int, why: str) -> None:
        """Note that a worker comes no more: whoever waits for it, now or later, hears so."""
        self._gone[worker] = why
        for current in self._rounds.values():
            if current.requests and worker not in current.requests:
                self._fail(current)

    def rejoin(self, worker: int) -> None:
        """Note that a worker has been started anew."""
        self._gone.pop(worker, None)

    def _fail(self, current: _Round) -> None:
        words = "; ".join(f"worker {worker}: {why}" for worker, why in self._gone.items())
        for request in current.requests.values():
            request.fail(WorldError(f"What all workers do together cannot go on without some. Gone: {words}."))
        current.requests = {}

    def fail(self, error: HvdxError) -> None:
        """Answer all that wait with an error."""
        for current in self._rounds.values():
            for request in current.requests.values():
                request.fail(error)


def _reduced(name: str, requests: Sequence[Request]) -> list[np.ndarray]:
    first = requests[0]
    for other in requests[1:]:
        for what, of in (("operations", _op_of), ("shapes and dtypes", _specs_of)):
            if of is _specs_of and _op_of(first) == OF_EVERY_WORKER:
                continue
            if of(first) != of(other):
                raise MismatchError(
                    f"The workers reduce {name!r} with different {what}: {of(first)} on worker {first.worker}, "
                    f"{of(other)} on worker {other.worker}."
                )
    if _op_of(first) == FROM_WORKER_0:
        return first.arrays
    if _op_of(first) == OF_EVERY_WORKER:
        return [array for request in requests for array in request.arrays]
    op = ReduceOp.of(first.header["op_name"])
    return [reduced(arrays, op) for arrays in zip(*(request.arrays for request in requests), strict=True)]


def _op_of(request: Request) -> str:
    return str(request.header["op_name"])


def _specs_of(request: Request) -> str:
    return str([f"{array.dtype.name}{list(array.shape)}" for array in request.arrays])
