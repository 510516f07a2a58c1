"""The tensorflow communicator: TensorFlow's own collective ops between processes, NCCL on GPUs and RING on CPUs.

Both are inside TensorFlow's wheel, so there is nothing to compile and, where TF_CONFIG says who the ranks are, no MPI.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hvdx import environment, fusion
from hvdx.comm.agreement import Waiting
from hvdx.comm.communicator import Topology
from hvdx.comm.deadline import DeadlineThread
from hvdx.comm.native import Keys, NativeCommunicator, first_lines
from hvdx.comm.reduce_op import ReduceOp
from hvdx.comm.rendezvous import Meeting, meet, unreachable
from hvdx.comm.roll_call import roll_call
from hvdx.comm.roster import Roster
from hvdx.comm.signature import HEADER_LENGTH
from hvdx.comm.wire import from_words, moving, reducible, to_words
from hvdx.errors import ConfigurationError, StallError, WorldError

_GROUP = 0x68766478
"""Keys of groups: far from the small ones that strategies of tf.distribute count from 1."""
_REDUCED = frozenset({tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64})
_MOVED = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})
_SMALL = frozenset({tf.uint8, tf.int8, tf.uint16, tf.int16})
_ON_GPU = frozenset({tf.float16, tf.float32, tf.float64})
_MERGE = {
    ReduceOp.SUM: "Add", ReduceOp.AVERAGE: "Add", ReduceOp.MIN: "Min", ReduceOp.MAX: "Max", ReduceOp.PRODUCT: "Mul",
}  # fmt: skip
_SLOWER = 30.0
"""Seconds by which TensorFlow's own detection of a silent rank is slower than HVDX_TIMEOUT, whose error says more."""
_PAYLOAD_SLOWER = 5.0
"""The same for payloads, whose end by TensorFlow's limit is the only one that raises an error in a graph."""


@dataclass
class Servers:
    """TensorFlow's servers, which start once in a process and run until it ends."""

    meeting: Meeting
    strategy: Any
    roster: Roster = field(default_factory=Roster)
    keys: Keys = field(default_factory=Keys)
    topology: Topology = field(default_factory=Topology)


_servers: Servers | None = None


class TensorFlowCommunicator(NativeCommunicator):
    """All processes of TF_CONFIG, HVDX_TF_ADDRESSES or the launcher.

    The constructor must run before TensorFlow has executed anything. It takes the GPU of this process's local rank,
    unless the program has chosen devices, since they cannot be chosen later.
    """

    name: ClassVar[str] = "tensorflow"
    ops_run_in_sessions: ClassVar[bool] = False

    def __init__(self) -> None:
        global _servers
        again = _servers is not None
        if _servers is None:
            meeting = meet(os.environ)
            _servers = Servers(meeting, _start(meeting))
        super().__init__(_servers.roster, _servers.keys)
        self._thread = DeadlineThread("hvdx-tensorflow")
        meeting = _servers.meeting
        self.topology = Topology.from_hosts(meeting.rank, meeting.hosts)
        self._gpu = bool(tf.config.get_visible_devices("GPU"))
        if not again:
            _servers.topology = Topology.from_hosts(meeting.rank, self._join())
        self.topology = _servers.topology

    # -- ops -------------------------------------------------------------------------------------------------------

    def _rows(self, row: np.ndarray, waiting: Waiting) -> np.ndarray:
        # Another thread waits, so that the limit need not be TensorFlow's: it aborts with noise, and not always well.
        try:
            return self._thread.call(lambda: self._gather_rows(row, waiting.limit + _SLOWER), waiting.limit)
        except TimeoutError:
            raise StallError("TensorFlow's exchange did not end") from None
        except tf.errors.OpError as error:
            raise self._failed(error) from None

    def _gather_rows(self, row: np.ndarray, seconds: float) -> np.ndarray:
        key = 1 + int(row.size != HEADER_LENGTH)  # headers and words: an instance of a collective has one shape
        with tf.device("/CPU:0"):
            result: np.ndarray = self._gather_op(tf.constant(row[np.newaxis]), key, seconds).numpy()
        return result

    def _reduce(self, tensors: list[Any], op: ReduceOp, numbers: Any, threshold: int) -> list[Any]:
        wired = [reducible(tensor, op, _REDUCED, self.topology.size) for tensor in tensors]
        share = 1.0 / self.topology.size
        ready = [w.tensor * tf.constant(share, w.tensor.dtype) if w.divide else w.tensor for w in wired]

        def exchange(flat: Any, index: int) -> Any:
            return tf.raw_ops.CollectiveReduceV2(
                input=flat, merge_op=_MERGE[op], final_op="Id", **self._common(flat, _key(numbers, index))
            )

        return [w.restore(back) for w, back in zip(wired, self._fused(ready, threshold, exchange), strict=True)]

    def _bcast(self, tensors: list[Any], root: int, numbers: Any, threshold: int) -> list[Any]:
        wired = [moving(tensor, _MOVED | _SMALL) for tensor in tensors]
        send = root == self.topology.rank

        def exchange(flat: Any, index: int) -> Any:
            words = to_words(flat) if flat.dtype in _SMALL else flat
            common = self._common(words, _key(numbers, index))
            del common["ordering_token"]
            if send:
                back = tf.raw_ops.CollectiveBcastSendV2(input=words, **common)
            else:
                back = tf.raw_ops.CollectiveBcastRecvV2(T=words.dtype, shape=tf.shape(words), **common)
            return from_words(back, flat.dtype)[: tf.size(flat)] if flat.dtype in _SMALL else back

        ready = [w.tensor for w in wired]
        return [w.restore(back) for w, back in zip(wired, self._fused(ready, threshold, exchange), strict=True)]

    def _gather(self, tensor: Any, numbers: Any) -> Any:
        wired = moving(tensor, _MOVED | _SMALL)
        ready, size = wired.tensor, self.topology.size
        row = ready.shape[1:]
        longest = tf.cast(numbers[1], tf.int32)
        padded = tf.pad(ready, [[0, longest - tf.shape(ready)[0]], *([[0, 0]] * row.rank)])
        flat = tf.reshape(padded, [-1])
        words = to_words(flat) if flat.dtype in _SMALL else flat
        with self._device(words.dtype):
            gathered = self._gather_op(words[tf.newaxis], _key(numbers, 0))
        if flat.dtype in _SMALL:
            gathered = tf.reshape(from_words(tf.reshape(gathered, [-1]), flat.dtype), [size, -1])[:, : tf.size(flat)]
        every = tf.reshape(gathered, tf.concat([[size, longest], row], 0))
        return wired.restore(tf.boolean_mask(every, tf.sequence_mask(numbers[2:], longest)))

    def _fused(self, tensors: list[Any], threshold: int, exchange: Any) -> list[Any]:
        """Apply `exchange` to flat buffers made of the tensors."""
        plan = fusion.plan([t.shape for t in tensors], [t.dtype.as_numpy_dtype for t in tensors], threshold)
        results: dict[int, Any] = {}
        for index, bucket in enumerate(plan.buckets):
            parts = [tf.reshape(tensors[slot.index], [-1]) for slot in bucket.slots]
            with self._device(parts[0].dtype):
                flat = exchange(tf.concat(parts, 0) if len(parts) > 1 else parts[0], index)
                split = tf.split(flat, [prod(slot.shape) for slot in bucket.slots]) if len(parts) > 1 else [flat]
            for slot, part in zip(bucket.slots, split, strict=True):
                results[slot.index] = tf.reshape(part, slot.shape)
        return [results[index] for index in range(len(tensors))]

    def _gather_op(self, tensor: Any, key: Any, seconds: float | None = None) -> Any:
        common = self._common(tensor, key)
        if seconds is not None:
            common["timeout_seconds"] = seconds
        return tf.raw_ops.CollectiveGatherV2(input=tensor, **common)

    def _common(self, tensor: Any, key: Any) -> dict[str, Any]:
        on_gpu = self._gpu and tensor.dtype in _ON_GPU
        return {
            "group_size": self.topology.size,
            "group_key": _GROUP + int(on_gpu),
            "instance_key": key,
            "ordering_token": [],
            "communication_hint": "nccl" if on_gpu else "ring",
            "timeout_seconds": environment.TIMEOUT.read() + _PAYLOAD_SLOWER,
        }

    def _device(self, dtype: Any) -> contextlib.AbstractContextManager[Any]:
        device: contextlib.AbstractContextManager[Any] = tf.device(
            "/GPU:0" if self._gpu and dtype in _ON_GPU else "/CPU:0"
        )
        return device


def _key(numbers: Any, index: int) -> Any:
    return tf.cast(numbers[0], tf.int32) + index


# -- starting ------------------------------------------------------------------------------------------------------


def _start(meeting: Meeting) -> Any:
    """Start TensorFlow's servers by the public way, a strategy that is used for nothing else."""
    _choose_gpu(meeting.local_rank)
    _configure_coordination(meeting)
    limit = environment.START_TIMEOUT.read()
    if not meeting.met:
        roll_call(meeting.rank, meeting.addresses, limit)
    with _tf_config(meeting):
        try:
            return DeadlineThread("hvdx-start").call(lambda: _make_strategy("auto"), limit)
        except TimeoutError:
            absent = unreachable(meeting)
            who = ", ".join(f"rank {rank} at {meeting.addresses[rank]}" for rank in absent) or "a rank"
            raise StallError(
                f"TensorFlow's servers did not all come up within {limit:g} s (HVDX_START_TIMEOUT). Missing: {who}."
            ) from None
        except RuntimeError as error:
            if "program startup" not in str(error):
                raise WorldError(f"TensorFlow's servers cannot start: {first_lines(error)}") from error
            raise ConfigurationError(
                "hvd.init() came too late for the tensorflow communicator: TensorFlow has already executed something "
                "(made a tensor, a variable, a model or a dataset). Call hvd.init() first, right after the imports."
            ) from None
        except tf.errors.OpError as error:
            raise WorldError(f"TensorFlow's servers cannot start: {first_lines(error)}") from error


def stock_strategy(implementation: str, bytes_per_pack: int | None = None) -> Any:
    """Return TensorFlow's MultiWorkerMirroredStrategy between the ranks; the world must have been joined.

    Args:
        implementation: "auto", "ring" or "nccl".
        bytes_per_pack: largest pack of gradients; TensorFlow's choice where it is None.
    """
    assert _servers is not None
    with _tf_config(_servers.meeting):
        return _make_strategy(implementation, bytes_per_pack or 0)


def _make_strategy(implementation: str, bytes_per_pack: int = 0) -> Any:
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=bytes_per_pack,
        timeout_seconds=environment.TIMEOUT.read() + _PAYLOAD_SLOWER,
        implementation=tf.distribute.experimental.CommunicationImplementation(implementation.upper()),
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


@contextlib.contextmanager
def _tf_config(meeting: Meeting) -> Iterator[None]:
    """Set TF_CONFIG for the block; what the program does with tf.distribute later must not see it."""
    before = os.environ.get("TF_CONFIG")
    job, index = meeting.task
    cluster = {name: list(addresses) for name, addresses in meeting.cluster.items()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
    try:
        yield
    finally:
        if before is None:
            del os.environ["TF_CONFIG"]
        else:
            os.environ["TF_CONFIG"] = before


def _choose_gpu(local_rank: int) -> None:
    """Take one GPU, as programs do after init(); they may do it again, the same way."""
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1 and tf.config.get_visible_devices("GPU") == gpus:
        with contextlib.suppress(RuntimeError):  # too late: the strategy says so
            tf.config.set_visible_devices(gpus[local_rank % len(gpus)], "GPU")
            for gpu in gpus:
                tf.config.experimental.set_memory_growth(gpu, True)


def _configure_coordination(meeting: Meeting) -> None:
    """Set the limits of TensorFlow's coordination service, which a strategy leaves at short defaults."""
    from tensorflow.python.eager import context

    jobs = [
        context.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(addresses))
        for job, addresses in meeting.cluster.items()
    ]
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{next(iter(meeting.cluster))}/replica:0/task:0",
        cluster_register_timeout_in_ms=int(1000 * environment.START_TIMEOUT.read()),
        heartbeat_timeout_in_ms=int(1000 * (environment.TIMEOUT.read() + _SLOWER)),
        coordinated_jobs=jobs,
    )
