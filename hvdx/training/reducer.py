"""The one place where gradients become global: every way into hvdx is a thin adapter in front of this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from hvdx import environment, world
from hvdx.comm.communicator import Label
from hvdx.comm.order import together
from hvdx.comm.reduce_op import ReduceOp
from hvdx.compression import Codec, Compression, check_codec
from hvdx.errors import ConfigurationError
from hvdx.fusion import buckets_in_reverse
from hvdx.ops.broadcast import variable_name
from hvdx.ops.convert import to_tensor
from hvdx.ops.sparse import allreduce_slices
from hvdx.training.autotune import Tuner

_BUCKET_BYTES = 32 << 20
_FIRST_BUCKET_BYTES = 1 << 20
_SAME_BATCH = (
    "all ranks computed bit-identical gradients in the first step, so they read the SAME batch: this trains like one "
    "process, N times over. Give each rank its own part of the data with hvd.shard(...)."
)


@dataclass(frozen=True)
class GradientReducer:
    """How gradients are reduced.

    Args:
        op: hvd.Average, Sum, Min, Max or Product.
        fusion_threshold: largest fusion buffer in bytes; HVDX_FUSION_THRESHOLD where it is None.
        compression: a codec, for example hvd.Compression.fp16.
        sparse_as_dense: what happens to IndexedSlices: True sends the dense tensor, False the rows, "auto" whichever
            is fewer bytes, decided by all ranks together each time.
        missing_gradients: what happens to a gradient that is None: "error" (None on all ranks stays None, None on some
            ranks only is an error), or "zeros" (None counts as zeros; the result is then never None).
        tuner: what searches for the fastest way to send them, or None.
        warns: whether equal gradients on all ranks mean that they read the same data, which is worth a warning.

    Raises:
        ConfigurationError: an option has no meaning; names it.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    fusion_threshold: int | None = None
    compression: Codec | Any = Compression.none
    sparse_as_dense: bool | str = "auto"
    missing_gradients: str = "error"
    warns: bool = True
    tuner: Tuner | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", ReduceOp.of(self.op))
        if self.sparse_as_dense not in (True, False, "auto"):
            raise ConfigurationError(f"sparse_as_dense is True, False or 'auto'. Received: {self.sparse_as_dense!r}.")
        if self.missing_gradients not in ("error", "zeros"):
            raise ConfigurationError(f"missing_gradients is 'error' or 'zeros'. Received: {self.missing_gradients!r}.")
        check_codec(self.compression)
        environment.check_threshold(self.fusion_threshold)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients reduced over all ranks; collective, eager or in a graph.

        Args:
            gradients: tensors, IndexedSlices or None, one a variable.
            variables: the variables they belong to, for their names and shapes.

        Returns:
            The reduced gradients in the same order: IndexedSlices where they were, unless `sparse_as_dense=True`.

        Raises:
            GradientError: a gradient is None on some ranks only.
            MismatchError: the ranks' gradients differ in number, shape or dtype.
        """
        communicator = world.communicator()
        names = [variable_name(variable) for variable in variables]
        values = [self._filled(grad, variable) for grad, variable in zip(gradients, variables, strict=True)]
        if communicator.topology.size == 1:
            return values
        absent = tuple((place, name) for place, name in enumerate(names) if values[place] is None)
        dense = [index for index, value in enumerate(values) if isinstance(value, tf.Tensor)]
        sparse = [index for index, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
        results: list[Any] = list(values)
        with together([value for value in values if value is not None]):
            self._reduce_into(results, names, dense, sparse, absent)
        return results

    def _reduce_into(
        self,
        results: list[Any],
        names: Sequence[str],
        dense: Sequence[int],
        sparse: Sequence[int],
        absent: tuple[tuple[int, str], ...],
    ) -> None:
        """Replace the gradients at the given places with reduced ones."""
        if dense or absent:
            label = Label(
                "gradients", tuple(names[index] for index in dense), _SAME_BATCH if self.warns else "", absent
            )
            for index, value in zip(dense, self._reduce_dense([results[i] for i in dense], label), strict=True):
                results[index] = value
        if sparse:
            slices = [results[index] for index in sparse]
            about = [names[index] for index in sparse]
            reduced = allreduce_slices(
                slices,
                self.op,
                about,
                self.sparse_as_dense == "auto",
                codec=self.compression,
                threshold=self.fusion_threshold,
            )
            for index, value in zip(sparse, reduced, strict=True):
                results[index] = value

    def _filled(self, gradient: Any, variable: Any) -> Any:
        if gradient is None:
            return tf.zeros_like(to_tensor(variable)) if self.missing_gradients == "zeros" else None
        if isinstance(gradient, tf.IndexedSlices):
            by_rows = self.op in (ReduceOp.SUM, ReduceOp.AVERAGE) and self.sparse_as_dense is not True
            return gradient if by_rows else tf.convert_to_tensor(gradient)
        return gradient

    def _reduce_dense(self, values: list[Any], label: Label) -> list[Any]:
        threshold = environment.FUSION_THRESHOLD.read() if self.fusion_threshold is None else self.fusion_threshold
        compressed, contexts = [], []
        if not values:  # the ranks that have gradients must hear of this one, which has none
            world.communicator().grouped_allreduce([tf.zeros([1])], self.op, label, threshold)
            return []
        for value in values:
            packed, context = self.compression.compress(value)
            compressed.append(packed)
            contexts.append(context)
        sizes = _nbytes(compressed)
        if self.tuner is not None and sizes is not None:
            reduced = self.tuner.reduce(lambda size: self._exchange(compressed, sizes, size, label, threshold))
        else:
            reduced = self._exchange(compressed, sizes, self._bucket_bytes(), label, threshold)
        return [self.compression.decompress(value, ctx) for value, ctx in zip(reduced, contexts, strict=True)]

    def _bucket_bytes(self) -> int:
        """Return the bytes of a bucket that is to leave before the last gradient is there, 0 where none is."""
        topology = world.communicator().topology
        asked = environment.OVERLAP.read()
        if asked == "0" or (asked == "auto" and topology.local_size == topology.size) or tf.executing_eagerly():
            return 0
        if self.fusion_threshold is not None:
            return self.fusion_threshold
        return int(environment.FUSION_THRESHOLD.read()) if environment.FUSION_THRESHOLD.source() else _BUCKET_BYTES

    def _exchange(
        self, values: list[Any], sizes: list[int] | None, bucket_bytes: int, label: Label, threshold: int
    ) -> list[Any]:
        """Return the tensors reduced, in one operation, or in one for each bucket of `bucket_bytes`."""
        communicator = world.communicator()
        if sizes is None or not bucket_bytes:
            return communicator.grouped_allreduce(values, self.op, label, threshold)
        results: list[Any] = list(values)
        for number, places in enumerate(buckets_in_reverse(sizes, bucket_bytes, _FIRST_BUCKET_BYTES)):
            about = replace(
                label,
                names=tuple(label.names[place] for place in places),
                warn_if_equal=label.warn_if_equal if number == 0 else "",
            )
            reduced = communicator.grouped_allreduce([values[place] for place in places], self.op, about, threshold)
            for place, value in zip(places, reduced, strict=True):
                results[place] = value
        return results


def _nbytes(values: Sequence[Any]) -> list[int] | None:
    """Return the bytes of each tensor, or None where a graph does not know them."""
    counts = [value.shape.num_elements() for value in values]
    if any(count is None for count in counts):
        return None
    return [int(count) * value.dtype.size for count, value in zip(counts, values, strict=True)]
