"""The horovod communicator: Horovod 0.28.1's own TensorFlow ops, and with them its NCCL, MPI and Gloo."""

from __future__ import annotations

import hashlib
import os
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hvdx import environment
from hvdx.comm.agreement import Waiting
from hvdx.comm.communicator import Topology
from hvdx.comm.deadline import DeadlineThread
from hvdx.comm.native import NativeCommunicator, first_lines
from hvdx.comm.reduce_op import ReduceOp
from hvdx.comm.roster import Roster
from hvdx.comm.wire import moving, reducible
from hvdx.errors import MissingDependencyError, StallError, WorldError

_REDUCED = frozenset({tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64})
_MOVED = _REDUCED | {tf.uint16, tf.int16, tf.bool}
_SLOWER = 30.0
"""Seconds by which Gloo's own limit is longer than HVDX_TIMEOUT, whose error says more."""


class HorovodCommunicator(NativeCommunicator):
    """All ranks of Horovod's world, by whatever launcher, as Horovod finds them."""

    name: ClassVar[str] = "horovod"

    def __init__(self) -> None:
        self._horovod = _import()
        self._thread = DeadlineThread("hvdx-horovod")
        if not self._horovod.is_initialized():
            _start(self._horovod, self._thread)
        super().__init__(Roster())
        h = self._horovod
        self._ops = {
            ReduceOp.SUM: h.Sum, ReduceOp.AVERAGE: h.Sum, ReduceOp.MIN: h.Min, ReduceOp.MAX: h.Max,
            ReduceOp.PRODUCT: h.Product,
        }  # fmt: skip
        self.topology = Topology(h.rank(), h.size(), h.local_rank(), h.local_size(), h.cross_rank(), h.cross_size())
        self._join()

    def _rows(self, row: np.ndarray, waiting: Waiting) -> np.ndarray:
        # Horovod's waits have no limit, so another thread waits.
        try:
            return self._thread.call(lambda: self._gather_rows(row), waiting.limit)
        except TimeoutError as error:
            raise StallError("Horovod's exchange did not end") from error
        except tf.errors.OpError as error:
            raise self._failed(error) from None

    def _gather_rows(self, row: np.ndarray) -> np.ndarray:
        function = self._functions.get(("rows", row.size))
        if function is None:

            def rows(mine: Any) -> Any:
                return self._horovod.allgather(mine, name=f"hvdx_agreement_{row.size}", ignore_name_scope=True)

            function = tf.function(rows, input_signature=[tf.TensorSpec([1, row.size], tf.int64)], autograph=False)
            self._functions["rows", row.size] = function
        with tf.device("/CPU:0"):
            result: np.ndarray = function(tf.constant(row[np.newaxis])).numpy()
        return result

    def _reduce(self, tensors: list[Any], op: ReduceOp, numbers: Any, threshold: int) -> list[Any]:
        # Horovod fuses the tensors of a group itself, in buffers of HOROVOD_FUSION_THRESHOLD.
        size = self.topology.size
        wired = [reducible(tensor, op, _REDUCED, size) for tensor in tensors]
        groups: dict[tuple[Any, bool], list[int]] = {}
        for index, w in enumerate(wired):
            groups.setdefault((w.tensor.dtype, w.divide), []).append(index)
        results: dict[int, Any] = {}
        for (_, divide), members in groups.items():
            group = [wired[index].tensor for index in members]
            reduced = self._horovod._grouped_allreduce(
                group,
                name=_name(f"allreduce_{op.value}_{divide}", group),
                op=self._ops[op],
                prescale_factor=1.0 / size if divide else 1.0,
                ignore_name_scope=True,
            )
            results.update(zip(members, reduced, strict=True))
        return [w.restore(results[index]) for index, w in enumerate(wired)]

    def _gather(self, tensor: Any, numbers: Any) -> Any:
        wired = moving(tensor, _MOVED)
        name = _name("allgather", [wired.tensor])
        return wired.restore(self._horovod.allgather(wired.tensor, name=name, ignore_name_scope=True))

    def _bcast(self, tensors: list[Any], root: int, numbers: Any, threshold: int) -> list[Any]:
        wired = [moving(tensor, _MOVED) for tensor in tensors]
        # named one by one: all are under way at the same time, and Horovod pairs by name
        name = _name(f"broadcast_{root}", [w.tensor for w in wired])
        return [
            w.restore(self._horovod.broadcast(w.tensor, root, name=f"{name}_{index}", ignore_name_scope=True))
            for index, w in enumerate(wired)
        ]


def _name(kind: str, tensors: list[Any]) -> str:
    """Return the name by which Horovod pairs the ranks' ops: it depends on kind, shapes and dtypes only.

    So ranks that traced their functions at different times, or some eagerly, have the same.
    """
    parts = [f"{t.dtype.name}{t.shape.as_list()}" for t in tensors]
    return f"hvdx_{kind}_{hashlib.blake2b(','.join(parts).encode(), digest_size=8).hexdigest()}"


def _import() -> Any:
    try:
        from horovod.tensorflow import mpi_ops
    except ImportError as error:
        raise MissingDependencyError(
            f"The horovod communicator needs Horovod built for this TensorFlow ({tf.__version__}), and it cannot be "
            f"loaded: {error}. Build it with scripts/build_horovod.sh, or leave the choice to hvdx (HVDX_COMM=auto)."
        ) from error
    except (tf.errors.OpError, OSError) as error:
        raise MissingDependencyError(
            f"Horovod is installed but was built for another TensorFlow than {tf.__version__}, or another MPI: "
            f"{first_lines(error)}. Build it again with scripts/build_horovod.sh."
        ) from error
    return mpi_ops


def _start(horovod: Any, thread: DeadlineThread) -> None:
    """Initialize Horovod, with its own limits set so that hvdx's come first."""
    limit = environment.TIMEOUT.read()
    gloo = "HOROVOD_GLOO_TIMEOUT_SECONDS"
    os.environ[gloo] = str(int(max(limit + _SLOWER, float(os.environ.get(gloo) or 0))))
    os.environ["HOROVOD_FUSION_THRESHOLD"] = str(environment.FUSION_THRESHOLD.read())
    # hvdx says for whom a rank waits, in every call; Horovod would say it again
    os.environ.setdefault("HOROVOD_STALL_CHECK_DISABLE", "1")
    seconds = environment.START_TIMEOUT.read()
    try:
        thread.call(horovod.init, seconds)
    except TimeoutError:
        raise StallError(
            f"Horovod did not start within {seconds:g} s (HVDX_START_TIMEOUT): a rank did not come, or the ranks "
            "cannot reach each other."
        ) from None
    except (ValueError, RuntimeError, ImportError) as error:
        raise WorldError(f"Horovod cannot start: {error}") from error
