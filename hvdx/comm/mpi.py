"""The MPI communicator: mpi4py on whole contiguous buffers.

The ranks agree on every call through a non-blocking all-gather of a few integers, polled with a growing pause, so that
a rank that waits uses no core and notices when it has waited too long. The payload then moves by MPI's blocking
collectives, watched by a thread, since a rank can also stop in the middle of one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hvdx import environment
from hvdx.comm.agreement import Waiting
from hvdx.comm.algorithms.over_mpi import TUNABLE, check_choices
from hvdx.comm.communicator import Topology
from hvdx.comm.host import HostCommunicator, as_array
from hvdx.comm.mpi_buffers import MpiBuffers
from hvdx.comm.mpi_library import MPI
from hvdx.comm.operation import as_written, in_turn
from hvdx.comm.point_to_point import PointToPoint
from hvdx.comm.reduce_op import ReduceOp
from hvdx.comm.signature import Signature
from hvdx.comm.stall import Watchdog, asked, find_missing
from hvdx.errors import CollectiveError, StallError
from hvdx.logs import log

_SPIN_SECONDS = 100e-6
"""Peers of the same step come within microseconds; only after that does a rank let go of its core."""
_LONGEST_PAUSE = 1e-3


class MpiCommunicator(HostCommunicator):
    """All ranks of an mpi4py communicator (COMM_WORLD by default).

    Args:
        comm: an mpi4py intracommunicator; it is duplicated, so traffic of the program's own cannot collide.
    """

    name: ClassVar[str] = "mpi"

    _spin_seconds = _SPIN_SECONDS

    def __init__(self, comm: Any = None) -> None:
        super().__init__()
        parent = MPI.COMM_WORLD if comm is None else comm
        algorithm = environment.ALLREDUCE.read()
        self._notes = parent
        self._meet(parent)
        self._comm = parent.Dup()
        self._notes = parent.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        told = self._comm.allgather((MPI.Get_processor_name(), algorithm))
        self._hosts: list[str] = [host for host, _ in told]
        self._algorithm: str = algorithm
        check_choices([choice for _, choice in told])
        self.topology = Topology.from_hosts(self._comm.Get_rank(), self._hosts)
        self._point_to_point = PointToPoint(parent.Dup())
        self._watchdog = Watchdog(self._notes)
        self._buffers = MpiBuffers(self._comm, self._payload, self._hosts, algorithm)

    def _meet(self, parent: Any) -> None:
        """Wait, with a limit, until all ranks have come; what follows then cannot wait for one that has not started."""
        limit = environment.START_TIMEOUT.read()
        signature = Signature("init", "the start of hvdx")
        request = parent.Ibarrier()
        self._wait(request, Waiting(signature, limit, "the start of MPI", time.monotonic(), 1), "HVDX_START_TIMEOUT")

    @property
    def algorithms(self) -> tuple[str, ...]:
        return TUNABLE if self.topology.size > 1 else ()

    def use_algorithm(self, name: str) -> None:
        self._buffers.algorithm = name

    # -- primitives ------------------------------------------------------------------------------------------------

    def _exchange(self, row: np.ndarray, waiting: Waiting) -> np.ndarray:
        rows = np.empty((self.topology.size, row.size), row.dtype)
        try:
            request = self._comm.Iallgather(row, rows)
            if not request.Test():
                self._wait(request, waiting)
        except MPI.Exception as error:
            raise CollectiveError(f"MPI failed in {waiting.signature.describe()}: {error}") from error
        return rows

    def _wait(self, request: Any, waiting: Waiting, variable: str = "HVDX_TIMEOUT") -> None:
        """Poll `request` until it is done, or say who is missing."""
        self._wait_until(request.Test, time.sleep, waiting, variable)

    def _wait_until(
        self,
        done: Callable[[], bool],
        pause: Callable[[float], Any],
        waiting: Waiting,
        variable: str = "HVDX_TIMEOUT",
        *,
        longest: float = _LONGEST_PAUSE,
    ) -> None:
        """Ask `done` again and again, or say who is missing.

        Args:
            done: whether the others have come.
            pause: lets go of the core for as many seconds; may return earlier, when something has happened.
            waiting: who waits for what, and the limit.
            variable: the name of what sets the limit.
            longest: seconds of a pause.

        Raises:
            StallError: the limit is over.
        """
        spin_until = time.perf_counter() + self._spin_seconds
        while time.perf_counter() < spin_until:
            if done():
                return
        warn_at = environment.STALL_WARNING.read()
        seconds = 20e-6
        notes = None
        while not done():
            pause(seconds)
            seconds = min(seconds * 1.5, longest)
            waited = waiting.seconds
            if notes is None and (waited > min(warn_at, waiting.limit / 2) or asked(self._notes)):
                notes = find_missing(self._notes, waiting.sequence)
            if notes is not None:
                notes.answer()
            if waited > warn_at and notes is not None:
                log.warning("waiting: %s", waiting.describe(notes.missing()))
                warn_at = max(2 * warn_at, waited)
            if waited > waiting.limit:
                missing = notes.missing() if notes is not None else []
                raise StallError(f"{waiting.describe(missing)} The limit is {waiting.limit:g} s ({variable}).")

    @contextlib.contextmanager
    def _payload(self) -> Iterator[None]:
        """Watch a blocking call, and turn what MPI raises into hvdx's error; no collective can follow it."""
        try:
            with self._watchdog.watch(self._agreement):
                yield
        except MPI.Exception as error:
            self._agreement.error = CollectiveError(f"MPI failed in {self._agreement.last}: {error}")
            raise self._agreement.error from error

    def _reduce(self, buffer: np.ndarray, op: ReduceOp) -> None:
        self._buffers.reduce(buffer, op)

    def _gather(self, part: np.ndarray, counts: Sequence[int], result: np.ndarray) -> None:
        self._buffers.gather(part, counts, result)

    def _alltoall(self, parts: np.ndarray, result: np.ndarray) -> None:
        self._buffers.alltoall(parts, result)

    def _bcast(self, buffer: np.ndarray, root: int) -> None:
        self._buffers.bcast(buffer, root)

    # -- point to point --------------------------------------------------------------------------------------------

    @as_written
    def send(self, tensor: Any, destination: int, tag: int) -> Any:
        self._check_rank(destination, "destination")

        def run(array: np.ndarray) -> list[np.ndarray]:
            self._point_to_point.send(np.asarray(array, order="C"), destination, tag)
            return [np.zeros((), np.int8)]

        if tf.executing_eagerly():
            run(as_array(tensor))
            return None
        return tf.group(in_turn(run, [tensor], [tf.int8]))

    @as_written
    def recv(self, dtype: Any, shape: Any, source: int, tag: int) -> Any:
        self._check_rank(source, "source")
        shape = tf.TensorShape(shape)

        def run() -> np.ndarray:
            return self._point_to_point.recv(np.dtype(dtype.as_numpy_dtype), shape.as_list(), source, tag)

        if tf.executing_eagerly():
            return tf.convert_to_tensor(run(), dtype)
        result = in_turn(run, [], dtype)
        result.set_shape(shape)
        return result

    # -- leaving ---------------------------------------------------------------------------------------------------

    def close(self, clean: bool) -> bool:
        self._watchdog.stop()
        if not (clean and self._agreement.say_goodbye()):
            return False
        self._agreement.end()
        for comm in (self._comm, self._notes, self._point_to_point.comm):
            comm.Free()
        return True
