"""`DistributedGradientTape`: a `tf.GradientTape` whose gradients are reduced over all ranks."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import tensorflow as tf

from hvdx import environment, world
from hvdx.comm.reduce_op import ReduceOp
from hvdx.compression import Codec, Compression
from hvdx.errors import OptimizerError
from hvdx.logs import log
from hvdx.ops.convert import to_tensor
from hvdx.ops.xla import refuse_inside_xla
from hvdx.training.reducer import GradientReducer
from hvdx.training.under_strategy import current, mark_global, reduces_by_itself


class DistributedGradientTape:
    """Wraps a tape; `gradient` is then collective: every rank must call it, in the same order.

    Args:
        tape: a `tf.GradientTape`, in use or after its `with` block.
        op, fusion_threshold, compression, sparse_as_dense, missing_gradients: as for `hvd.DistributedOptimizer`.

    Raises:
        OptimizerError: `tape` is no gradient tape.
        ConfigurationError: an option has no meaning.
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        op: ReduceOp | str = ReduceOp.AVERAGE,
        *,
        fusion_threshold: int | None = None,
        compression: Codec | Any = Compression.none,
        sparse_as_dense: bool | str = "auto",
        missing_gradients: str = "error",
    ) -> None:
        if not isinstance(tape, tf.GradientTape):
            hint = " It is already wrapped." if isinstance(tape, DistributedGradientTape) else ""
            raise OptimizerError(f"DistributedGradientTape takes a tf.GradientTape.{hint} Received: {tape!r}.")
        self._tape = tape
        self._reducer = GradientReducer(op, fusion_threshold, compression, sparse_as_dense, missing_gradients)  # type: ignore[arg-type]

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *details: Any) -> Any:
        return self._tape.__exit__(*details)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return the reduced gradients of `target` with respect to `sources`, in their structure; collective.

        In a replica of `strategy("mirrored")` it is over all devices too. An optimizer in a replica sums up what it is
        given, as under any strategy: of the average (of losses that are divided by the number of replicas) it makes the
        sum. One of Keras 3 that is given these gradients as they are does so without another exchange.

        Args:
            target: as for `tf.GradientTape.gradient`.
            sources: tensors or variables (of TensorFlow or any Keras), or nested lists, tuples and dicts of them.
            output_gradients, unconnected_gradients: as for `tf.GradientTape.gradient`.

        Raises:
            GradientError: a gradient is None on some ranks only.
            MismatchError, StallError: as `hvd.allreduce`.
            XlaError: inside a function compiled by XLA.
        """
        refuse_inside_xla()
        flat = tf.nest.flatten(sources)
        with self._stopped():
            gradients = self._tape.gradient(
                target, [_watched(source) for source in flat], output_gradients, unconnected_gradients
            )
            named = [_named(source) for source in flat]
            _say_that_tapes_do_not_search()
            if reduces_by_itself():
                reduced = current().extended.hvdx_reduce(gradients, named, self._reducer)
            else:
                reduced = self._reducer.reduce(gradients, named)
        mark_global(reduced)
        return tf.nest.pack_sequence_as(sources, reduced)

    def _stopped(self) -> Any:
        """A persistent tape still records while it is open; the exchange is no part of the computation."""
        if getattr(self._tape, "_recording", False) and getattr(self._tape, "_persistent", False):
            return self._tape.stop_recording()
        return contextlib.nullcontext()


@functools.cache
def _say_that_tapes_do_not_search() -> None:
    if environment.AUTOTUNE.read() and world.rank() == 0:
        log.warning(
            "%s has no effect on a DistributedGradientTape: a search needs hvd.DistributedOptimizer.",
            environment.AUTOTUNE.name,
        )


def _watched(source: Any) -> Any:
    """Return what the tape recorded: for a variable of Keras 3 the tf.Variable inside it."""
    inner = getattr(source, "value", None)
    return source if inner is None or callable(inner) else inner


def _named(source: Any) -> Any:
    return source if hasattr(source, "name") or hasattr(source, "path") else to_tensor(source)
