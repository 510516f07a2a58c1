"""One model's training on one server: registration, pushes, pulls, state. How updates are made is `updates.py`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdx.distribute.parameter_server.clocks import Clocks, named
from hvdx.distribute.parameter_server.placement import Placement
from hvdx.distribute.parameter_server.reduction import Rows
from hvdx.distribute.parameter_server.registration import contradiction, placement_of
from hvdx.distribute.parameter_server.request import Request
from hvdx.distribute.parameter_server.rounds import Rounds
from hvdx.distribute.parameter_server.shard import Shard
from hvdx.distribute.parameter_server.updates import Asynchronous, Synchronous, Updates
from hvdx.errors import HvdxError, WorldError

_WITHOUT_VARIABLES = frozenset(("register", "reduce", "stats"))


class Group:
    """A model that workers train together through this server.

    Args:
        name: what the workers call it.
        server: which server this is.
        workers: how many workers there are.
    """

    def __init__(self, name: str, server: int, workers: int) -> None:
        self.name = name
        self._server, self._workers = server, workers
        self._clocks = Clocks.of(workers)
        self._rounds = Rounds(workers)
        self._spec: tuple[int, dict[str, Any]] | None = None
        self._sessions: dict[int, str] = {}
        self._waiting: list[Request] = []
        self._placement: Placement | None = None
        self._shard: Shard | None = None
        self._updates: Updates | None = None
        self._finalized = 0
        self._failure: HvdxError | None = None
        self._handlers: dict[str, Callable[[Request], None]] = {
            "register": self._register, "push": self._push, "scale": self._scale, "pull": self._pull,
            "reduce": self._rounds.join, "stats": self._stats, "state": self._state, "load": self._load,
            "finalize": self._finalize,
        }  # fmt: skip

    def handle(self, request: Request) -> None:
        """Answer a request, now or later."""
        if self._failure is not None:
            request.fail(self._failure)
            return
        if self._shard is None and request.header["op"] not in _WITHOUT_VARIABLES:
            request.fail(
                WorldError(f"Server {self._server} has no variables of {self.name!r}: it has been started anew.")
            )
            return
        try:
            self._handlers[request.header["op"]](request)
        except HvdxError as error:
            self.fail(error)
            request.fail(error)

    def fail(self, error: HvdxError) -> None:
        """End the training of this model with an error, which everyone hears who asks."""
        self._failure = error
        for request in self._waiting:
            request.fail(error)
        self._rounds.fail(error)
        if self._updates is not None:
            self._updates.fail(error)

    def leave(self, worker: int, why: str) -> None:
        """Note that a worker has finished ("finished"), or is gone."""
        if self._failure is not None or not self._clocks.leave(worker, why):
            return
        if self._updates is not None:
            self._updates.left(worker, why)
        self._rounds.leave(worker, why)
        if self._shard is None and (worker == 0 or self._spec is not None):
            self.fail(WorldError(f"Worker {worker} is gone before all had registered their variables: {why}."))

    def stats(self) -> dict[str, Any]:
        """Return the counters."""
        total = sum(a.nbytes for a in self._shard.read()) if self._shard is not None else 0
        return {"group": self.name, "server": self._server, "bytes": total, **self._clocks.stats()}

    # -- registration ----------------------------------------------------------------------------------------------

    def _register(self, request: Request) -> None:
        spec, worker = request.header["spec"], request.worker
        if self._spec is None:
            self._spec = (worker, spec)
        error = contradiction(self._spec[1], self._spec[0], spec, worker)
        if error is not None:
            raise error
        request.header["first"] = self._sessions.get(worker, request.header["session"]) == request.header["session"]
        if self._sessions.get(worker) != request.header["session"]:
            self._sessions[worker] = request.header["session"]
            self._clocks.workers[worker].gone = ""  # started anew: it goes on where it was
            self._rounds.rejoin(worker)
        if self._shard is None and worker == 0:
            self._create(spec, request.arrays)
        self._waiting = [*(waiting for waiting in self._waiting if waiting.worker != worker), request]
        missing = (
            set(range(self._workers)) - set(self._sessions) if spec["options"]["updates"] == "synchronous" else set()
        )
        if self._shard is None or missing:
            for waiting in self._waiting:
                waiting.waits_for = f"{named(missing or [0])} to register its variables"
            return
        for waiting in self._waiting:
            header = {"clock": self._clocks.workers[waiting.worker].clock, "version": self._clocks.updates}
            waiting.answer({**header, "first": waiting.header["first"]}, self._shard.read())
        self._waiting = []

    def _create(self, spec: dict[str, Any], arrays: list[np.ndarray]) -> None:
        options = spec["options"]
        self._placement = placement_of(spec)
        self._shard = Shard(self._placement, self._server, spec, arrays)
        names = [spec["variables"][piece.entry]["key"] for piece in self._shard.pieces]
        make = Synchronous if options["updates"] == "synchronous" else Asynchronous
        self._updates = make(self._shard, self._clocks, names, options)

    def _ready(self) -> tuple[Shard, Updates]:
        if self._shard is None or self._updates is None:
            raise WorldError(f"Server {self._server} has no variables of {self.name!r}.")
        return self._shard, self._updates

    # -- steps -----------------------------------------------------------------------------------------------------

    def _push(self, request: Request) -> None:
        shard, updates = self._ready()
        header, arrays = request.header, iter(request.arrays)
        gradients: list[Any] = []
        for kind in header["kinds"] or [None] * len(shard.pieces):
            if kind is None:
                gradients.append(None)
            elif kind == "rows":
                gradients.append(Rows(next(arrays), next(arrays)))
            else:
                gradients.append(next(arrays))
        updates.push(request, gradients)

    def _scale(self, request: Request) -> None:
        self._ready()[1].scale(request)

    def _pull(self, request: Request) -> None:
        shard, updates = self._ready()
        values = shard.read()
        asked = request.header["rows"]
        for number, indices in zip(asked, request.arrays, strict=True):
            values[number] = values[number][indices]
        request.answer(updates.version(), values)

    def _stats(self, request: Request) -> None:
        request.answer({"stats": self.stats()})

    # -- state -----------------------------------------------------------------------------------------------------

    def _state(self, request: Request) -> None:
        shard, updates = self._ready()
        updates.flush()
        about, arrays = shard.state()
        request.answer({"about": about, "updates": self._clocks.updates}, arrays)

    def _load(self, request: Request) -> None:
        shard, _ = self._ready()
        shard.load(request.header["about"], request.arrays)
        request.answer()

    def _finalize(self, request: Request) -> None:
        shard, updates = self._ready()
        updates.flush()
        if request.header["number"] == self._finalized:  # asked again, it is not done again
            self._finalized += 1
            shard.finalize()
        request.answer()
