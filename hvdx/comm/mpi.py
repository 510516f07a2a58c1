"""The MPI communicator: mpi4py on whole contiguous buffers.

The ranks agree on every call through a non-blocking all-gather of a few integers, polled with a growing pause, so that
a rank that waits uses no core and notices when it has waited too long. The payload then moves by MPI's blocking
collectives, watched by a thread, since a rank can also stop in the middle of one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hvdx import environment
from hvdx.comm.agreement import Waiting
from hvdx.comm.communicator import Topology
from hvdx.comm.host import HostCommunicator, as_array
from hvdx.comm.mpi_library import MPI
from hvdx.comm.operation import in_turn
from hvdx.comm.point_to_point import PointToPoint
from hvdx.comm.reduce_op import ReduceOp
from hvdx.comm.signature import Signature
from hvdx.comm.stall import Watchdog, asked, find_missing
from hvdx.errors import CollectiveError, StallError
from hvdx.logs import log

_SPIN_SECONDS = 100e-6
"""Peers of the same step come within microseconds; only after that does a rank let go of its core."""
_LONGEST_PAUSE = 1e-3
_PIECE = 1 << 30
"""Bytes in one MPI call; MPI counts elements in 32 bits."""


class MpiCommunicator(HostCommunicator):
    """All ranks of an mpi4py communicator (COMM_WORLD by default).

    Args:
        comm: an mpi4py intracommunicator; it is duplicated, so traffic of the program's own cannot collide.
    """

    name: ClassVar[str] = "mpi"

    def __init__(self, comm: Any = None) -> None:
        super().__init__()
        parent = MPI.COMM_WORLD if comm is None else comm
        self._notes = parent
        self._meet(parent)
        self._comm = parent.Dup()
        self._notes = parent.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        hosts = self._comm.allgather(MPI.Get_processor_name())
        self.topology = Topology.from_hosts(self._comm.Get_rank(), hosts)
        self._point_to_point = PointToPoint(parent.Dup())
        self._watchdog = Watchdog(self._notes)
        self._ops = {
            ReduceOp.SUM: MPI.SUM, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX, ReduceOp.PRODUCT: MPI.PROD,
        }  # fmt: skip

    def _meet(self, parent: Any) -> None:
        """Wait, with a limit, until all ranks have come; what follows then cannot wait for one that has not started."""
        limit = environment.START_TIMEOUT.read()
        signature = Signature("init", "the start of hvdx")
        request = parent.Ibarrier()
        self._wait(request, Waiting(signature, limit, "the start of MPI", time.monotonic(), 1), "HVDX_START_TIMEOUT")

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
        spin_until = time.perf_counter() + _SPIN_SECONDS
        while time.perf_counter() < spin_until:
            if request.Test():
                return
        warn_at = environment.STALL_WARNING.read()
        pause = 20e-6
        notes = None
        while not request.Test():
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
            seconds = waiting.seconds
            if notes is None and (seconds > min(warn_at, waiting.limit / 2) or asked(self._notes)):
                notes = find_missing(self._notes, waiting.sequence)
            if notes is not None:
                notes.answer()
            if seconds > warn_at and notes is not None:
                log.warning("waiting: %s", waiting.describe(notes.missing()))
                warn_at = max(2 * warn_at, seconds)
            if seconds > waiting.limit:
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
        step = _PIECE // buffer.dtype.itemsize
        with self._payload():
            for start in range(0, buffer.size, step):
                self._comm.Allreduce(MPI.IN_PLACE, buffer[start : start + step], self._ops[op])

    def _gather(self, part: np.ndarray, counts: Sequence[int], result: np.ndarray) -> None:
        total = sum(counts)
        with self._payload():
            if total <= _PIECE:
                self._comm.Allgatherv(part, [result, list(counts)])
                return
            start = 0
            for root, count in enumerate(counts):
                piece = result[start : start + count]
                if root == self.topology.rank:
                    piece[:] = part
                self._bcast_pieces(piece, root)
                start += count

    def _alltoall(self, parts: np.ndarray, result: np.ndarray) -> None:
        with self._payload():
            for start in range(0, parts.shape[1], _PIECE // self.topology.size):
                stop = start + _PIECE // self.topology.size
                sent = np.ascontiguousarray(parts[:, start:stop])
                received = np.empty_like(sent)
                self._comm.Alltoall(sent, received)
                result[:, start:stop] = received

    def _bcast(self, buffer: np.ndarray, root: int) -> None:
        with self._payload():
            self._bcast_pieces(buffer, root)

    def _bcast_pieces(self, buffer: np.ndarray, root: int) -> None:
        for start in range(0, buffer.size, _PIECE):
            self._comm.Bcast(buffer[start : start + _PIECE], root)

    # -- point to point --------------------------------------------------------------------------------------------

    def send(self, tensor: Any, destination: int, tag: int) -> Any:
        self._check_rank(destination, "destination")

        def run(array: np.ndarray) -> list[np.ndarray]:
            self._point_to_point.send(np.asarray(array, order="C"), destination, tag)
            return [np.zeros((), np.int8)]

        if tf.executing_eagerly():
            run(as_array(tensor))
            return None
        return tf.group(in_turn(run, [tensor], [tf.int8]))

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
        for comm in (self._comm, self._notes, self._point_to_point.comm):
            comm.Free()
        return True
