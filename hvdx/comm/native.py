"""The base of communicators whose payload moves by a library's own TensorFlow ops: agreement, order and limits.

A collective is three operations: the agreement (a `tf.numpy_function`, in which the library gathers a few integers),
the payload, and one that notes the end. The first and the last are stateful, so TensorFlow keeps them in program order,
and the payload, whatever its ops, lies between them. The payload is one function that is not inlined: the ops in it
see the same surroundings on every rank, eager or in a graph, in a loop or not.
"""

from __future__ import annotations

import abc
import contextlib
import json
import secrets
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from hvdx import environment
from hvdx.comm import departure
from hvdx.comm.addresses import Contact, contact, reachable
from hvdx.comm.agreement import Agreement, Waiting
from hvdx.comm.barrier import barrier
from hvdx.comm.call import Call, Keys, as_array, fingerprint_op, numpy_dtype_of, without_empty
from hvdx.comm.communicator import Communicator, Label
from hvdx.comm.dtypes import numpy_dtype
from hvdx.comm.first_batch import fingerprint, warn_if_equal
from hvdx.comm.monitor import Monitor
from hvdx.comm.operation import as_written, in_turn
from hvdx.comm.order import current_place, in_order
from hvdx.comm.reduce_op import ReduceOp, require_reducible
from hvdx.comm.roster import TOKEN_BYTES, Roster
from hvdx.comm.signature import Signature, check_thresholds
from hvdx.errors import CollectiveError, ConfigurationError, HvdxError, StallError, UnsupportedError

_MOST_FUNCTIONS = 512
"""Payload functions kept; a program whose shapes change all the time must not grow for ever."""

_ROWS, _FINGERPRINT, _THRESHOLD = 2, 3, 4
"""Columns of a header."""


class NativeCommunicator(Communicator):
    """A subclass sets `topology` and calls `_join`, and writes the ops.

    Args:
        roster: answers the other ranks' questions.
        keys: numbers given out before, by a communicator whose library is still in use.
    """

    ops_run_in_sessions: ClassVar[bool] = True
    """Whether the library's ops run in graphs of `tf.compat.v1.Session` as well."""

    def __init__(self, roster: Roster, keys: Keys | None = None) -> None:
        self._agreement = Agreement(self._exchange)
        self._roster = roster
        self._monitor = Monitor(roster, self._agreement)
        departure.install()
        self._functions: dict[tuple[Any, ...], Any] = {}
        self._watched: dict[Label, list[bool]] = {}
        self._keys = keys or Keys()

    @abc.abstractmethod
    def _rows(self, row: np.ndarray, waiting: Waiting) -> np.ndarray:
        """Return all ranks' rows of int64, by the library, eagerly.

        Raises:
            StallError: a rank did not come within `waiting.limit`; need not name it.
            CollectiveError: the library failed.
        """

    @abc.abstractmethod
    def _reduce(self, tensors: list[Any], op: ReduceOp, numbers: Any, threshold: int) -> list[Any]:
        """Return ops that reduce non-empty tensors of known shapes."""

    @abc.abstractmethod
    def _gather(self, tensor: Any, numbers: Any) -> Any:
        """Return ops that concatenate the ranks' tensors; all dimensions but the first are known and above 0."""

    @abc.abstractmethod
    def _bcast(self, tensors: list[Any], root: int, numbers: Any, threshold: int) -> list[Any]:
        """Return ops that give every rank the tensors (non-empty, of known shapes) of `root`."""

    # -- the contract ----------------------------------------------------------------------------------------------

    @as_written
    def grouped_allreduce(self, tensors: Sequence[Any], op: ReduceOp, label: Label, threshold: int) -> list[Any]:
        for tensor in tensors:
            require_reducible(numpy_dtype(tensor), op)

        def build(values: list[Any], numbers: Any) -> list[Any]:
            return without_empty(values, lambda full: self._reduce(full, op, numbers, threshold))

        watch = self._watched.setdefault(label, [bool(label.warn_if_equal)])
        call = Call("allreduce", op.value, label, build, (op, threshold), threshold=threshold, watch=watch)
        return self._run(call, tensors)

    @as_written
    def allgather(self, tensor: Any, label: Label) -> Any:
        numpy_dtype(tensor)
        if tensor.shape.rank == 0:
            raise ConfigurationError("allgather concatenates on dimension 0, and a scalar has none. Reshape it to [1].")
        return self._run(Call("allgather", "", label, self._build_gather, ragged=True), [tensor])[0]

    @as_written
    def broadcast(self, tensors: Sequence[Any], root: int, label: Label) -> list[Any]:
        self.check_root(root)
        for tensor in tensors:
            numpy_dtype(tensor)
        threshold = environment.FUSION_THRESHOLD.read()
        return self._run(self._broadcast_call(root, label, threshold), tensors)

    def barrier(self, label: Label) -> Any:
        return barrier(self._agreement, label)

    def send(self, tensor: Any, destination: int, tag: int) -> Any:
        self._check_rank(destination, "destination")
        raise self._no_point_to_point("send")

    def recv(self, dtype: Any, shape: Any, source: int, tag: int) -> Any:
        self._check_rank(source, "source")
        raise self._no_point_to_point("recv")

    def _no_point_to_point(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"The {self.name} communicator has no {what}: its library moves data only between all ranks at once. "
            "Use the mpi communicator (HVDX_COMM=mpi)."
        )

    def allgather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        tensor = np.frombuffer(payload, np.uint8)
        call = Call("allgather", "bytes", Label(what, ("bytes",)), self._build_gather, ragged=True)
        with eager(), self._agreement.lock:
            [joined], numbers = self._run_now(call, [tensor])
        raw, ends = joined.numpy().tobytes(), np.cumsum(numbers[2:])
        return [raw[end - count : end] for end, count in zip(ends, numbers[2:], strict=True)]

    def broadcast_bytes(self, payload: bytes | None, root: int, what: str) -> bytes:
        self._check_payload(payload, root)
        call = self._broadcast_call(root, Label(what, ("bytes",)), 0)
        with eager(), self._agreement.lock:
            signature = Signature("broadcast", what, (), f"root {root}")
            numbers = self._agree(call, signature, len(payload or b""), 0)
            length = int(numbers[2 + root])
            buffer = np.zeros(rounded(length), np.uint8)
            buffer[: len(payload or b"")] = np.frombuffer(payload or b"", np.uint8)
            [result] = self._pay(call, [buffer], numbers)
        return bytes(result.numpy()[:length].tobytes())

    # -- calls -----------------------------------------------------------------------------------------------------

    def _broadcast_call(self, root: int, label: Label, threshold: int) -> Call:
        def build(values: list[Any], numbers: Any) -> list[Any]:
            return without_empty(values, lambda full: self._bcast(full, root, numbers, threshold))

        return Call("broadcast", f"root {root}", label, build, (root, threshold), threshold=threshold)

    def _build_gather(self, values: list[Any], numbers: Any) -> list[Any]:
        [tensor] = values
        row = tensor.shape[1:]
        if row.num_elements() == 0:
            return [tf.zeros(tf.concat([tf.reduce_sum(numbers[2:], keepdims=True), row], 0), tensor.dtype)]
        result = self._gather(tensor, numbers)
        result.set_shape([None, *row])
        return [result]

    # -- running them ----------------------------------------------------------------------------------------------

    def _run(self, call: Call, tensors: Sequence[Any]) -> list[Any]:
        """Run a call on tensors: at once where TensorFlow is eager, else as operations of the graph."""
        tensors = [tf.stop_gradient(tensor) for tensor in tensors]
        if not tensors:
            return []
        if tf.executing_eagerly():
            with self._agreement.lock:
                return list(self._run_now(call, tensors)[0])
        known = [tensor.shape[1:] if call.ragged else tensor.shape for tensor in tensors]
        runs_here = self.ops_run_in_sessions or tf.compat.v1.executing_eagerly_outside_functions()
        direct = runs_here and all(shape.is_fully_defined() for shape in known)
        run = self._run_in_graph if direct else self._run_by_numpy
        about = f"{call.kind} {call.label.what}"
        return in_order(lambda: run(call, tensors), tensors, about=about)

    def _run_now(self, call: Call, tensors: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
        """Run a call on eager tensors or arrays; the caller holds the lock."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        dtypes = [numpy_dtype_of(tensor) for tensor in tensors]
        mark = fingerprint([as_array(tensor) for tensor in tensors]) if call.watch[0] else 0
        numbers = self._agree(call, call.signature(shapes, dtypes), shapes[0][0] if call.ragged else 0, mark)
        return self._pay(call, tensors, numbers), numbers

    def _pay(self, call: Call, tensors: Sequence[Any], numbers: np.ndarray) -> list[Any]:
        """Run the payload on eager tensors or arrays."""
        payload = self._payload(call, [tuple(t.shape) for t in tensors], [tf.as_dtype(t.dtype) for t in tensors])
        try:
            return list(payload(tf.constant(numbers), *map(tf.convert_to_tensor, tensors)))
        except tf.errors.OpError as error:
            raise self._failed(error) from None
        finally:
            self._monitor.end()

    def _run_in_graph(self, call: Call, tensors: list[Any]) -> list[Any]:
        dtypes = [numpy_dtype_of(tensor) for tensor in tensors]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        signature = call.signature(shapes, dtypes)

        def agree(rows: np.ndarray, mark: np.ndarray) -> np.ndarray:
            with self._agreement.lock:
                numbers = self._agree(call, signature, int(rows), int(mark))
                if current_place():
                    self._agreement.turns.hold(current_place())
            return numbers

        def end() -> np.ndarray:
            self._monitor.end()
            with self._agreement.lock:
                self._agreement.turns.release()
            return np.zeros((), np.int8)

        rows = tf.shape(tensors[0], tf.int64)[0] if call.ragged else tf.constant(0, tf.int64)
        numbers = in_turn(agree, [rows, fingerprint_op(call, tensors)], tf.int64)
        numbers.set_shape([2 + self.topology.size])
        results = self._payload(call, shapes, [tensor.dtype for tensor in tensors])(numbers, *tensors)
        with tf.control_dependencies(results), tf.control_dependencies([in_turn(end, [], tf.int8)]):
            return [tf.identity(result) for result in results]

    def _run_by_numpy(self, call: Call, tensors: list[Any]) -> list[Any]:
        """Run a call eagerly, inside one operation: its shapes are not known before, or its ops do not run here."""
        dtypes = [tensor.dtype for tensor in tensors]

        def run(*arrays: np.ndarray) -> list[np.ndarray]:
            with eager(), self._agreement.lock:
                results, _ = self._run_now(call, arrays)
            return [result.numpy() for result in results]

        results = in_turn(run, tensors, dtypes)
        for result, tensor in zip(results, tensors, strict=True):
            if tensor.shape.rank is not None:
                result.set_shape([None, *tensor.shape[1:]] if call.ragged else tensor.shape)
        return list(results)

    def _payload(self, call: Call, shapes: Sequence[tuple[Any, ...]], dtypes: Sequence[Any]) -> Any:
        """Return the function of a call's payload for these shapes and dtypes."""
        shapes = [(None, *shape[1:]) if call.ragged else shape for shape in shapes]
        key = (call.kind, call.parameters, tuple(shapes), tuple(dtypes))
        if key not in self._functions:
            if len(self._functions) >= _MOST_FUNCTIONS:
                self._functions.clear()

            def payload(numbers: Any, *values: Any) -> list[Any]:
                # TensorFlow may compute an operation on constants while it optimizes a graph, and to it a library's op
                # that does not say it is stateful is like any other; what could be fed is no constant.
                return call.build([tf.compat.v1.placeholder_with_default(v, v.shape) for v in values], numbers)

            shown = [tf.TensorSpec(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
            function = tf.function(payload, autograph=False, experimental_attributes={"_noinline": True})
            # a concrete function: one for each signature is meant, so TensorFlow need not warn of retracing
            self._functions[key] = function.get_concrete_function(
                tf.TensorSpec([2 + self.topology.size], tf.int64), *shown
            )
        return self._functions[key]

    # -- agreement -------------------------------------------------------------------------------------------------

    def _agree(self, call: Call, signature: Signature, rows: int, mark: int) -> np.ndarray:
        """Agree on a call, and begin its payload; the caller holds the lock.

        Returns:
            The numbers the payload needs, int64: a key, the rows to which a gather pads, and every rank's rows.
            The key is a number that the same call has again the next time, and no other call.
        """
        headers = self._agreement.agree(signature, rows, mark, call.threshold)
        check_thresholds(headers[:, _THRESHOLD], signature)
        if call.watch[0]:
            call.watch[0] = False
            warn_if_equal(mark, headers[:, _FINGERPRINT], call.label.warn_if_equal)
        counts = headers[:, _ROWS]
        longest = rounded(int(counts.max()))
        self._monitor.begin(signature)
        key = self._keys.of((signature.digest, call.threshold, longest), len(signature.tensors))
        return np.concatenate([[key, longest], counts]).astype(np.int64)

    def _exchange(self, row: np.ndarray, waiting: Waiting) -> np.ndarray:
        self._roster.sequence = waiting.sequence
        with self._monitor.waiting(waiting), eager():
            try:
                rows = self._rows(np.ascontiguousarray(row).view(np.int64), waiting)
            except StallError:
                departure.forbid()
                missing = self._roster.missing(waiting.sequence)
                limit = f"The limit is {waiting.limit:g} s (HVDX_TIMEOUT)."
                raise StallError(f"{waiting.describe(missing)} {limit}") from None
            except CollectiveError:
                departure.forbid()
                raise
        return rows.view(row.dtype)

    def _failed(self, error: Exception) -> HvdxError:
        """Return the error for a payload that failed; no collective can follow."""
        departure.forbid()
        if self._agreement.error is None:
            missing = self._roster.missing(self._agreement.sequence)
            about = f"The {self.name} communicator failed in {self._agreement.last}"
            who = f" No answer from rank(s) {', '.join(map(str, missing))}." if missing else ""
            kind = StallError if isinstance(error, tf.errors.DeadlineExceededError) else CollectiveError
            self._agreement.error = kind(f"{about}.{who} What the library said: {first_lines(error)}")
        return self._agreement.error

    # -- meeting and leaving ---------------------------------------------------------------------------------------

    def _join(self) -> list[str]:
        """Tell each other under which address each rank answers, and return the names of the ranks' hosts."""
        own = {"contact": contact(self._roster.port).pack().decode(), "token": secrets.token_hex(TOKEN_BYTES)}
        told = [json.loads(raw) for raw in self.allgather_bytes(json.dumps(own).encode(), "the ranks' addresses")]
        contacts = [Contact.unpack(entry["contact"].encode()) for entry in told]
        peers = [(host, c.ports[0]) for host, c in zip(reachable(contacts), contacts, strict=True)]
        self._roster.join(self.topology.rank, peers, bytes.fromhex(told[0]["token"]))
        return [c.host for c in contacts]

    def close(self, clean: bool) -> bool:
        together = clean and self._agreement.say_goodbye()
        self._monitor.stop()
        if not together:
            departure.forbid()
        return together


def eager() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which TensorFlow is eager, also where the program has switched that off."""
    return contextlib.nullcontext() if tf.executing_eagerly() else context.eager_mode()


def rounded(count: int) -> int:
    """Return `count` rounded up, by an eighth at most and at least to 1, so that few different sizes occur."""
    step = max(1, 1 << max(0, count.bit_length() - 4))
    return max(1, -(-count // step) * step)


def first_lines(error: Exception) -> str:
    """Return what an error of TensorFlow says, without its appendix."""
    return " ".join(str(error).split("\n\n")[0].split("\n")[:4])[:1000]
