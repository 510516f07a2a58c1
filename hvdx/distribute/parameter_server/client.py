"""`ParameterClient`: how a worker registers variables, pushes gradients and pulls parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdx.comm.reduce_op import ReduceOp
from hvdx.distribute.parameter_server import optimizers
from hvdx.distribute.parameter_server.clipping import factors, shared_clip
from hvdx.distribute.parameter_server.gradients import as_gradients, assembled, cut
from hvdx.distribute.parameter_server.held import Held
from hvdx.distribute.parameter_server.link import Link, Pending
from hvdx.distribute.parameter_server.options import Options
from hvdx.distribute.parameter_server.placement import PIECE_BYTES, Placement
from hvdx.distribute.parameter_server.protocol import Message
from hvdx.distribute.parameter_server.registration import placement_of
from hvdx.distribute.parameter_server.snapshots import Snapshots
from hvdx.errors import ConfigurationError, GradientError, UnsupportedError, WorldError

_FAREWELL = 10.0


class ParameterClient(Held):
    """One worker's way to the servers, for one model.

    Args:
        addresses: host:port of every server, in the same order on every worker.
        worker: this worker's number.
        workers: how many there are.
        token: what each message of the job carries; a secret of the job.
        group: the model's name, the same on all workers; several models may be trained through the same servers.
        updates: "synchronous": one is made of the average of all workers' gradients, and every worker waits for it;
            "asynchronous": as gradients arrive.
        staleness: asynchronous: by how many steps a worker may lead the slowest; None does not hold it back.
        gather: asynchronous: for how many gradients a server waits before it applies their average.
        piece_bytes: the largest piece of a variable in bytes (4 MiB).
        average: synchronous: whether the workers' gradients are averaged; else they are summed, as the losses under a
            `tf.distribute` strategy, which are divided by the number of replicas, need it.
        departed: returns the servers that are known to be gone, with the reason.

    Raises:
        ConfigurationError: an argument has no meaning.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        worker: int,
        workers: int,
        token: str,
        *,
        group: str = "model",
        updates: str = "synchronous",
        staleness: int | None = None,
        gather: int = 1,
        piece_bytes: int = PIECE_BYTES,
        average: bool = True,
        departed: Callable[[], Mapping[int, str]] | None = None,
    ) -> None:
        if not addresses or not 0 <= worker < workers:
            raise ConfigurationError(
                "A ParameterClient needs at least one server and a worker below the number of workers. Received: "
                f"addresses={list(addresses)!r}, worker={worker!r}, workers={workers!r}."
            )
        self.options = Options(workers, len(addresses), updates, staleness, gather, piece_bytes, average)
        self.placement: Placement | None = None
        self.rejoined = False
        super().__init__(Link(addresses, worker, token, group, departed), worker)
        self._clocks = [0] * len(addresses)
        self._versions = [0] * len(addresses)
        self._unanswered: list[Pending] = []
        self._snapshots = Snapshots()
        self._closed = False

    @property
    def synchronous(self) -> bool:
        """Whether every update is made of all workers' gradients."""
        return self.options.updates == "synchronous"

    @property
    def closed(self) -> bool:
        """Whether this worker has said goodbye."""
        return self._closed

    @property
    def clock(self) -> int:
        """How many pushes this worker has made."""
        return max(self._clocks)

    # -- registration ----------------------------------------------------------------------------------------------

    def register(self, variables: Sequence[Any], optimizer: Any) -> list[np.ndarray]:
        """Tell the servers which variables there are; return their values, those of worker 0; all workers call it.

        Args:
            variables: of TensorFlow or any Keras, in the same order on every worker.
            optimizer: an optimizer of Keras 3, tf_keras or Keras 2, which the servers will run.

        Raises:
            MismatchError: the workers' variables, optimizers or options differ; names worker and variable.
            OptimizerError, UnsupportedError: the servers cannot do that.
        """
        inner = optimizers.check(optimizer)
        values = [np.asarray(variable.numpy()) for variable in variables]
        self._spec = {
            "variables": optimizers.describe_variables(variables, inner),
            "optimizer": optimizers.describe(inner),
            "cuts": optimizers.cuts(inner),
        }
        return self._register(values)

    def _register(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        spec = {**self._spec, "options": self.options.plain()}
        self.placement = placement = placement_of(spec)
        config = spec["optimizer"]["saved"]["config"]
        self._clip = shared_clip(config.get("clipnorm"), config.get("global_clipnorm"), placement)
        if self._clip is not None and self.options.gather > 1:
            raise UnsupportedError(
                "Several servers gather different gradients, so that their norm cannot be clipped: gather="
                f"{self.options.gather} does not go together with global_clipnorm, nor with clipnorm where a variable "
                "is cut in pieces. Use clipvalue, or gather=1."
            )
        spec["options"]["clips"] = self._clip is not None
        requests = []
        for server in self._servers:
            pieces = placement.of_server(server)
            own = [piece.of(values[piece.entry]) for piece in pieces] if self.worker == 0 else []
            requests.append(self._link.request(server, "register", {"spec": spec}, own))
        replies = self._link.wait(requests)
        self._clocks = [reply.header["clock"] for reply in replies]
        self.rejoined = not replies[0].header["first"]
        return self._assemble(replies)

    def _registered(self) -> Placement:
        if self._closed:
            raise WorldError("This worker has left its parameter servers (hvd.shutdown(), or close()): they are gone.")
        if self.placement is None:
            raise WorldError("This ParameterClient has no variables: call register(variables, optimizer) first.")
        return self.placement

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self, gradients: Sequence[Any] | None, rate: float | None = None) -> list[np.ndarray] | None:
        """Push, and return the newest parameters: those after this update in synchronous mode.

        In asynchronous mode they are the newest that have come while the worker computed, or None where none have;
        meanwhile the next are asked for.

        Args:
            gradients: one for each variable: an array, a tensor, `tf.IndexedSlices` (of which the touched rows travel)
                or None; None for all where one of them is not finite and the step is to be skipped.
            rate: the learning rate in force, where the optimizer has no schedule.
        """
        replies = self._push(gradients, rate, wants=self.synchronous)
        if self.synchronous:
            return self._assemble(replies)
        return self._newest()

    def push(self, gradients: Sequence[Any] | None, rate: float | None = None) -> None:
        """Push gradients; in synchronous mode all workers do, and the update has been made when it returns."""
        self._push(gradients, rate, wants=False)

    def _push(self, gradients: Sequence[Any] | None, rate: float | None, wants: bool) -> list[Message]:
        placement = self._registered()
        if gradients is not None and all(gradient is None for gradient in gradients):
            raise GradientError("There is no gradient for any variable.")
        parts = cut(placement, None if gradients is None else as_gradients(placement, gradients))
        self._settle()
        finite = gradients is not None
        requests = []
        for server, (kinds, arrays) in enumerate(parts):
            header = {
                "clock": self._clocks[server], "version": self._versions[server], "rate": rate, "finite": finite,
                "kinds": kinds, "wants": wants,
            }  # fmt: skip
            requests.append(self._link.request(server, "push", header, arrays))
        clocks = self._clocks
        self._clocks = [clock + 1 for clock in clocks]
        if self._clip is None or not finite:
            if self.synchronous or self.options.staleness is not None:
                return self._link.wait(requests)
            self._unanswered = requests
            return []
        return self._scale(requests, clocks, wants)

    def _scale(self, requests: list[Pending], clocks: Sequence[int], wants: bool) -> list[Message]:
        """Turn the servers' norms into factors; none come in synchronous mode where another worker skips the step."""
        assert self._clip is not None
        replies = self._link.wait(requests)
        if any("norms" not in reply.header for reply in replies):
            return replies
        scales = factors(self._clip, self._registered(), [reply.header["norms"] for reply in replies])
        return self._link.wait(
            [
                self._link.request(server, "scale", {"clock": clock, "factors": scale, "wants": wants})
                for server, (clock, scale) in enumerate(zip(clocks, scales, strict=True))
            ]
        )

    def _settle(self) -> None:
        """Wait until the servers have taken the push before."""
        requests, self._unanswered = self._unanswered, []
        self._link.wait(requests)

    def _forget(self) -> None:
        self._snapshots = Snapshots()

    def pull(self, rows: Mapping[int, Any] | None = None) -> list[np.ndarray]:
        """Return the newest parameters.

        Args:
            rows: numbers of variables of which only some rows are wanted, with the rows' indices.
        """
        placement = self._registered()
        self._settle()
        wanted = {number: np.asarray(indices, np.int64).reshape(-1) for number, indices in (rows or {}).items()}
        return self._assemble(self._link.wait(self._ask(wanted)), wanted) if placement else []

    def _ask(self, rows: Mapping[int, np.ndarray]) -> list[Pending]:
        requests = []
        for server in self._servers:
            numbers, indices = [], []
            for number, piece in enumerate(self._registered().of_server(server)):
                if piece.entry in rows:
                    asked = rows[piece.entry]
                    numbers.append(number)
                    indices.append(asked[(asked >= piece.start) & (asked < piece.stop)] - piece.start)
            requests.append(self._link.request(server, "pull", {"rows": numbers}, indices))
        return requests

    def _assemble(self, replies: Sequence[Message], rows: Mapping[int, np.ndarray] | None = None) -> list[np.ndarray]:
        self._versions = [reply.header["version"] for reply in replies]
        return assembled(self._registered(), [reply.arrays for reply in replies], rows or {})

    def _newest(self) -> list[np.ndarray] | None:
        """Return the newest parameters that have come meanwhile, if they are new enough, and ask for the next."""
        bound = self.options.staleness
        least = None if bound is None else [clock - bound for clock in self._clocks]
        replies = self._snapshots.take(self._link, lambda: self._ask({}), least)
        return None if replies is None else self._assemble(replies)

    # -- what all workers do together ------------------------------------------------------------------------------

    def all_finite(self, finite: bool) -> bool:
        """Return whether the gradients are finite, of all workers in synchronous mode; and skip the step where not.

        The servers count the step as skipped, so that a worker that is told False must not push it again.
        """
        if self.synchronous:
            [everywhere] = self.push_pull([np.array([finite], np.int32)], ReduceOp.MIN, "all gradients finite")
            finite = bool(everywhere[0])
        if not finite:
            self.push(None)
        return finite

    # -- leaving -------------------------------------------------------------------------------------------------------

    def close(self, done: bool = True) -> None:
        """Say goodbye; the servers end when all workers have.

        Args:
            done: whether this worker has finished the job, and not only this model.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._settle()
        finally:
            self.leave(done, _FAREWELL)
