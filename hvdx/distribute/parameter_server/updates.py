"""When a server updates: once all workers have pushed (synchronous), or as pushes arrive (asynchronous)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from hvdx.distribute.parameter_server.clocks import Clocks, named
from hvdx.distribute.parameter_server.reduction import combined, scaled, squared_norm
from hvdx.distribute.parameter_server.request import Request
from hvdx.distribute.parameter_server.shard import Shard
from hvdx.errors import HvdxError, MismatchError, WorldError

Gradients = list[Any]


class Updates(abc.ABC):
    """Takes pushes and makes updates of them.

    Args:
        shard: what is updated.
        clocks: what is counted.
        names: of the pieces' variables.
        options: of the registration.
    """

    def __init__(self, shard: Shard, clocks: Clocks, names: Sequence[str], options: dict[str, Any]) -> None:
        self._shard, self._clocks, self._names = shard, clocks, names
        self._clips = options["clips"]
        self._average = options["average"]
        self._waiting: dict[int, Request] = {}

    @abc.abstractmethod
    def push(self, request: Request, gradients: Gradients) -> None:
        """Take a worker's gradients."""

    @abc.abstractmethod
    def scale(self, request: Request) -> None:
        """Take the factors that a worker computed from all servers' norms."""

    @abc.abstractmethod
    def left(self, worker: int, why: str) -> None:
        """Note that a worker does not count any more."""

    def flush(self) -> None:  # noqa: B027
        """Apply what has arrived and waits for more to come."""

    def fail(self, error: HvdxError) -> None:
        """Answer all that wait with an error."""
        for request in self._waiting.values():
            request.fail(error)
        self._waiting = {}

    def version(self) -> dict[str, Any]:
        """Return which version of the parameters there is, and what the slowest worker has pushed."""
        return {"version": self._clocks.updates, "slowest": self._clocks.slowest()}

    def _accept(self, request: Request) -> bool:
        header = request.header
        try:
            return self._clocks.accept(request.worker, header["clock"], header["version"], self._clocks.updates)
        except ValueError as error:
            raise MismatchError(f"A push was lost: {error}.") from None

    def _combined(self, pushes: Sequence[tuple[int, Gradients]]) -> Gradients:
        workers = [worker for worker, _ in pushes]
        return [
            combined(parts, shape, name, workers, self._average)
            for *parts, shape, name in zip(
                *(gradients for _, gradients in pushes), self._shard.shapes, self._names, strict=True
            )
        ]

    def _apply(self, gradients: Gradients, rate: float | None, count: int) -> None:
        self._shard.apply(gradients, rate)
        self._clocks.updates += 1
        self._clocks.applied += count


class Synchronous(Updates):
    """One update for the average of all workers' gradients, which every worker gets before it goes on."""

    def __init__(self, shard: Shard, clocks: Clocks, names: Sequence[str], options: dict[str, Any]) -> None:
        super().__init__(shard, clocks, names, options)
        self._arrived: dict[int, tuple[Request, Gradients]] = {}
        self._unscaled: Gradients | None = None
        self._norms: list[float | None] = []
        self._rate: float | None = None
        self._made = 0

    def push(self, request: Request, gradients: Gradients) -> None:
        worker, clock = request.worker, request.header["clock"]
        gone = {number: state.gone for number, state in enumerate(self._clocks.workers) if state.gone}
        if gone:
            raise _cannot_go_on(worker, clock, gone)
        if not self._accept(request):
            self._again(request)
            return
        self._arrived[worker] = (request, gradients)
        self._waiting[worker] = request
        missing = self._clocks.behind(clock + 1)
        for waiting in self._waiting.values():
            waiting.waits_for = f"the gradients of {named(missing)} for update {clock + 1}"
        if not missing:
            self._complete()

    def _again(self, request: Request) -> None:
        """Answer a push whose first answer was lost."""
        if request.worker in self._arrived:
            self._arrived[request.worker] = (request, self._arrived[request.worker][1])
            self._waiting[request.worker] = request
        elif self._unscaled is not None:
            request.answer({"norms": self._norms})
        else:
            self._answer(request)

    def _complete(self) -> None:
        ordered = [(worker, *self._arrived[worker]) for worker in sorted(self._arrived)]
        self._arrived = {}
        requests = [request for _, request, _ in ordered]
        if not all(request.header["finite"] for request in requests):
            for request in requests:
                self._clocks.workers[request.worker].dropped += 1
            self._clocks.skipped += 1
            self._shard.skip()
            self._finish(requests)
            return
        average = self._combined([(worker, gradients) for worker, _, gradients in ordered])
        self._rate = requests[0].header["rate"]
        if self._clips:
            self._unscaled = average
            self._norms = [squared_norm(gradient) for gradient in average]
            self._waiting = {}
            for request in requests:
                request.answer({"norms": self._norms})
            return
        self._apply(average, self._rate, len(requests))
        self._finish(requests)

    def scale(self, request: Request) -> None:
        if self._unscaled is not None and request.header["clock"] == self._made:
            factors = request.header["factors"]
            gradients = [scaled(g, factor) for g, factor in zip(self._unscaled, factors, strict=True)]
            self._unscaled = None
            self._apply(gradients, self._rate, len(self._clocks.workers))
            self._made += 1
        self._answer(request)

    def _finish(self, requests: Sequence[Request]) -> None:
        self._made += 1
        self._waiting = {}
        for request in requests:
            self._answer(request)

    def _answer(self, request: Request) -> None:
        request.answer(self.version(), self._shard.read() if request.header["wants"] else ())

    def left(self, worker: int, why: str) -> None:
        if not self._waiting:
            return
        first = next(iter(self._waiting.values()))
        error = _cannot_go_on(first.worker, first.header["clock"], {worker: why})
        self._arrived = {}
        self.fail(error)


def _cannot_go_on(worker: int, clock: int, gone: dict[int, str]) -> HvdxError:
    lost = {number: why for number, why in gone.items() if why != "finished"}
    if lost:
        words = "; ".join(f"worker {number}: {why}" for number, why in lost.items())
        return WorldError(f"Synchronous training cannot go on without all workers. Gone: {words}.")
    return MismatchError(
        f"Worker {worker} pushes the gradients of update {clock + 1}, and {named(gone)} finished before it: the "
        "workers made unequal numbers of steps. Give every worker the same number of batches."
    )


class Asynchronous(Updates):
    """Updates as pushes arrive: at once, or for the average of some; a worker may be held back until others follow."""

    def __init__(self, shard: Shard, clocks: Clocks, names: Sequence[str], options: dict[str, Any]) -> None:
        super().__init__(shard, clocks, names, options)
        self._bound: int | None = options["staleness"]
        self._gather: int = options["gather"]
        self._gathered: list[tuple[int, int, Gradients]] = []
        self._unscaled: dict[int, tuple[int, Gradients, float | None]] = {}
        self._rate: float | None = None

    def push(self, request: Request, gradients: Gradients) -> None:
        worker, header = request.worker, request.header
        if not self._accept(request):
            held = self._unscaled.get(worker)
            if held is not None and held[0] == header["clock"]:
                request.answer({"norms": [squared_norm(gradient) for gradient in held[1]]})
            else:
                self._hold(request)
            return
        if not header["finite"]:
            self._clocks.workers[worker].dropped += 1
            self._hold(request)
        elif self._clips:
            self._unscaled[worker] = (header["clock"], gradients, header["rate"])
            request.answer({"norms": [squared_norm(gradient) for gradient in gradients]})
        else:
            self._rate = header["rate"]
            self._gathered.append((worker, header["clock"], gradients))
            self._apply_gathered()
            self._hold(request)
        self._release()

    def scale(self, request: Request) -> None:
        worker = request.worker
        held = self._unscaled.get(worker)
        if held is not None and held[0] == request.header["clock"]:
            del self._unscaled[worker]
            factors = request.header["factors"]
            self._apply([scaled(g, factor) for g, factor in zip(held[1], factors, strict=True)], held[2], 1)
        self._hold(request)

    def flush(self) -> None:
        if self._gathered:
            pushes = [(worker, gradients) for worker, _, gradients in sorted(self._gathered, key=lambda p: p[:2])]
            self._gathered = []
            self._apply(self._combined(pushes), self._rate, len(pushes))

    def left(self, worker: int, why: str) -> None:
        held = self._unscaled.pop(worker, None)
        if held is not None:
            self._clocks.workers[worker].dropped += 1
        self._apply_gathered()
        self._release()

    def _apply_gathered(self) -> None:
        if len(self._gathered) >= max(1, min(self._gather, len(self._clocks.live()))):
            self.flush()

    def _hold(self, request: Request) -> None:
        """Answer now, or when the slowest worker is near enough."""
        self._waiting[request.worker] = request
        self._release(only=request.worker)

    def _release(self, only: int | None = None) -> None:
        for worker in [only] if only is not None else list(self._waiting):
            request = self._waiting[worker]
            if self._bound is None or self._clocks.lead(worker) <= self._bound:
                del self._waiting[worker]
                request.answer(self.version(), self._shard.read() if request.header["wants"] else ())
            else:
                behind = self._clocks.behind(self._clocks.workers[worker].clock - self._bound)
                request.waits_for = f"{named(behind)}, which it leads by more than {self._bound} step(s)"
