"""The base of communicators that move numpy buffers: it turns them into TensorFlow operations.

A collective is one `tf.numpy_function`: TensorFlow lends its tensors as arrays without a copy, they are packed into
fusion buffers, exchanged in place, and TensorFlow gets views of the result, again without a copy.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx import environment, fusion
from hvdx.comm.agreement import Agreement, Waiting
from hvdx.comm.barrier import barrier
from hvdx.comm.buffers import BufferPool
from hvdx.comm.communicator import Communicator, Label
from hvdx.comm.dtypes import numpy_dtype
from hvdx.comm.first_batch import fingerprint, warn_if_equal
from hvdx.comm.halves import PIECE, reduce_halves
from hvdx.comm.operation import as_written, in_turn
from hvdx.comm.order import in_order
from hvdx.comm.reduce_op import ReduceOp, is_half, require_reducible, truncated_quotient
from hvdx.comm.signature import Signature, TensorSpec, check_thresholds
from hvdx.logs import log

_MOST_PLANS = 256
"""Plans kept; a program whose shapes change all the time must not grow for ever."""


@dataclass
class Planned:
    """What is known of an all-reduce from its first call on.

    Args:
        signature: what the ranks compare.
        plan: where each tensor lies.
        threshold: the largest buffer that was asked for.
        notes: what a communicator has worked out for this plan.
    """

    signature: Signature
    plan: fusion.Plan
    threshold: int
    notes: dict[Any, Any] = field(default_factory=dict)


Plans = dict[tuple[Any, ...], Planned]
"""What is known for shapes and dtypes."""


class HostCommunicator(Communicator):
    """A subclass moves contiguous numpy buffers; everything else is here.

    The five primitives below run one at a time, after the ranks have agreed on the call, so they need not check.
    """

    def __init__(self) -> None:
        self._agreement = Agreement(self._exchange)
        self._pool = BufferPool()
        self._plans: dict[tuple[ReduceOp, Label, int], Plans] = {}
        self._watched: dict[Label, list[bool]] = {}

    @abc.abstractmethod
    def _exchange(self, row: np.ndarray, waiting: Waiting) -> np.ndarray:
        """Return all ranks' rows; wait at most `waiting.limit` seconds, then raise StallError naming who is missing."""

    @abc.abstractmethod
    def _reduce(self, buffer: np.ndarray, op: ReduceOp) -> None:
        """Reduce a typed 1-d buffer in place (Sum, Min, Max or Product; never 16-bit floats)."""

    @abc.abstractmethod
    def _gather(self, part: np.ndarray, counts: Sequence[int], result: np.ndarray) -> None:
        """Put every rank's uint8 `part` (of `counts[rank]` bytes) into `result`, in the order of ranks."""

    @abc.abstractmethod
    def _alltoall(self, parts: np.ndarray, result: np.ndarray) -> None:
        """Send row r of `parts` (ranks x bytes, uint8) to rank r; row r of `result` is what rank r sent."""

    @abc.abstractmethod
    def _bcast(self, buffer: np.ndarray, root: int) -> None:
        """Overwrite the uint8 buffer with that of `root`."""

    # -- all-reduce ------------------------------------------------------------------------------------------------

    @as_written
    def grouped_allreduce(self, tensors: Sequence[Any], op: ReduceOp, label: Label, threshold: int) -> list[Any]:
        for tensor in tensors:
            require_reducible(numpy_dtype(tensor), op)
        watch = self._watched.setdefault(label, [bool(label.warn_if_equal)])
        plans = self._plans.setdefault((op, label, threshold), {})

        def exchange(*arrays: np.ndarray) -> list[np.ndarray]:
            with self._agreement.lock:
                values = [np.asarray(a) for a in arrays]
                return self._allreduce_arrays(values, self._plan(plans, values, op, label, threshold), op, label, watch)

        return _as_operation(exchange, tensors, f"allreduce {label.what}")

    def _allreduce_arrays(
        self, arrays: list[np.ndarray], planned: Planned, op: ReduceOp, label: Label, watch: list[bool]
    ) -> list[np.ndarray]:
        mark = fingerprint(arrays) if watch[0] else 0
        headers = self._agreement.agree(
            planned.signature, mark, planned.threshold, prepare=lambda: self._prepare(planned, arrays, op)
        )
        check_thresholds(headers[:, 3], planned.signature)
        if watch[0]:
            watch[0] = False
            warn_if_equal(mark, headers[:, 2], label.warn_if_equal)
        with self._agreement.payload(planned.signature):
            return fusion.unpack(planned.plan, self._reduce_plan(planned, arrays, op, headers[:, 4]))

    @staticmethod
    def _plan(plans: Plans, arrays: list[np.ndarray], op: ReduceOp, label: Label, threshold: int) -> Planned:
        key = tuple([a.shape for a in arrays]), tuple([a.dtype for a in arrays])
        found = plans.get(key)
        if found is None:
            signature = Signature("allreduce", label.what, _specs(arrays, label), op.value, label.missing)
            plan = fusion.plan(*key, threshold)
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            found = plans[key] = Planned(signature, plan, threshold)
            log.debug("%s", plan.describe([label.name(i) for i in range(len(arrays))]))
        return found

    def _prepare(self, planned: Planned, arrays: list[np.ndarray], op: ReduceOp) -> int:
        """Do what can be done before the others come; return a number to tell them."""
        return 0

    def _reduce_plan(
        self, planned: Planned, arrays: list[np.ndarray], op: ReduceOp, told: np.ndarray
    ) -> list[np.ndarray]:
        """Return a buffer for each bucket of the plan, reduced.

        Args:
            planned: what is reduced.
            arrays: this rank's tensors.
            op: the operation.
            told: what each rank's `_prepare` returned.
        """
        buffers = []
        for bucket in planned.plan.buckets:
            buffer = self._pool.take(bucket.nbytes)
            self._reduce_bucket(bucket, arrays, buffer, op)
            buffers.append(buffer)
        return buffers

    def _reduce_bucket(self, bucket: fusion.Bucket, arrays: list[np.ndarray], buffer: np.ndarray, op: ReduceOp) -> None:
        size, dtype = self.topology.size, bucket.dtype
        if is_half(dtype):
            fusion.pack(bucket, arrays, buffer)
            values = buffer.view(dtype)
            for start in range(0, values.size, PIECE):
                self._reduce_half(values[start : start + PIECE], op)
        elif dtype.kind in "iu" and op is ReduceOp.AVERAGE:
            fusion.pack(bucket, arrays, buffer)
            wide = buffer.view(dtype).astype(np.uint64 if dtype.kind == "u" else np.int64)
            self._reduce(wide, ReduceOp.SUM)
            buffer.view(dtype)[:] = truncated_quotient(wide, size).astype(dtype)
        elif op is ReduceOp.AVERAGE:
            # Divided while it is copied: that costs nothing, and the sum cannot overflow.
            fusion.pack(bucket, arrays, buffer, 1.0 / size)
            self._reduce(buffer.view(dtype), ReduceOp.SUM)
        else:
            fusion.pack(bucket, arrays, buffer)
            self._reduce(buffer.view(np.uint8 if dtype.kind == "b" else dtype), op)

    def _reduce_half(self, values: np.ndarray, op: ReduceOp) -> None:
        """Reduce a piece of 16-bit floats in place."""
        reduce_halves(values, op, self.topology.size, self._reduce, self._alltoall, self._gather)

    # -- data movement ---------------------------------------------------------------------------------------------

    @as_written
    def allgather(self, tensor: Any, label: Label) -> Any:
        numpy_dtype(tensor)

        def exchange(array: np.ndarray) -> list[np.ndarray]:
            array = np.asarray(array, order="C")
            spec = TensorSpec(label.name(0), (-1, *array.shape[1:]), array.dtype.name)
            row = prod(array.shape[1:]) * array.dtype.itemsize
            with self._agreement.lock:
                signature = Signature("allgather", label.what, (spec,))
                headers = self._agreement.agree(signature, array.shape[0])
                counts = [int(n) * row for n in headers[:, 2]]
                result = self._pool.take(sum(counts))
                with self._agreement.payload(signature):
                    self._gather(array.reshape(-1).view(np.uint8), counts, result)
            return [result.view(array.dtype).reshape((int(headers[:, 2].sum()), *array.shape[1:]))]

        [result] = _as_operation(exchange, [tensor], f"allgather {label.what}", [[None, *tensor.shape[1:]]])
        return result

    @as_written
    def broadcast(self, tensors: Sequence[Any], root: int, label: Label) -> list[Any]:
        self.check_root(root)
        for tensor in tensors:
            numpy_dtype(tensor)

        def exchange(*arrays: np.ndarray) -> list[np.ndarray]:
            values = [np.asarray(a) for a in arrays]
            signature = Signature("broadcast", label.what, _specs(values, label), f"root {root}")
            threshold = environment.FUSION_THRESHOLD.read()
            plan = fusion.plan([a.shape for a in values], [a.dtype for a in values], threshold)
            buffers = []
            with self._agreement.lock:
                check_thresholds(self._agreement.agree(signature, 0, threshold)[:, 3], signature)
                for bucket in plan.buckets:
                    buffer = self._pool.take(bucket.nbytes)
                    if root == self.topology.rank:
                        fusion.pack(bucket, values, buffer)
                    with self._agreement.payload(signature):
                        self._bcast(buffer, root)
                    buffers.append(buffer)
            return fusion.unpack(plan, buffers)

        return _as_operation(exchange, tensors, f"broadcast {label.what}")

    def barrier(self, label: Label) -> Any:
        return barrier(self._agreement, label)

    def allgather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        with self._agreement.lock:
            signature = Signature("allgather", what)
            headers = self._agreement.agree(signature, len(payload))
            counts = [int(n) for n in headers[:, 2]]
            result = np.empty(sum(counts), np.uint8)
            with self._agreement.payload(signature):
                self._gather(np.frombuffer(payload, np.uint8), counts, result)
        ends = np.cumsum(counts)
        return [result[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)]

    def broadcast_bytes(self, payload: bytes | None, root: int, what: str) -> bytes:
        self._check_payload(payload, root)
        with self._agreement.lock:
            signature = Signature("broadcast", what, (), f"root {root}")
            headers = self._agreement.agree(signature, len(payload) if payload is not None else 0)
            buffer = np.empty(int(headers[root, 2]), np.uint8)
            if payload is not None:
                buffer[:] = np.frombuffer(payload, np.uint8)
            with self._agreement.payload(signature):
                self._bcast(buffer, root)
        return buffer.tobytes()


def _as_operation(
    function: Callable[..., list[np.ndarray]], tensors: Sequence[Any], about: str, shapes: Sequence[Any] | None = None
) -> list[Any]:
    """Run `function` on the tensors' arrays: at once where TensorFlow is eager, as one operation in a graph."""
    tensors = list(tensors)
    if not tensors:
        return []
    dtypes = [tensor.dtype for tensor in tensors]
    if tf.executing_eagerly():
        # not through numpy_function: errors keep their type, and nothing is copied on the way in
        results = function(*[as_array(tensor) for tensor in tensors])
        return [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]

    def build() -> list[Any]:
        return _as_list(in_turn(function, tensors, dtypes))

    outputs = in_order(build, tensors, about=about)
    for output, shape in zip(outputs, shapes or [tensor.shape for tensor in tensors], strict=True):
        output.set_shape(shape)
    return outputs


def _as_list(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def as_array(tensor: Any) -> np.ndarray:
    """Return an eager tensor's memory as an array, without a copy where numpy knows the dtype."""
    return np.asarray(tensor.numpy() if tensor.dtype == tf.bfloat16 else tensor)


def _specs(arrays: Sequence[np.ndarray], label: Label) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(label.name(i), a.shape, a.dtype.name) for i, a in enumerate(arrays))
