"""`compute_gradients` of v1 optimizers (`tf.compat.v1.train.Optimizer`): where their gradients become global."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdx.comm.order import in_order
from hvdx.errors import UnsupportedError
from hvdx.ops.broadcast import broadcast_variables
from hvdx.ops.convert import to_tensor
from hvdx.training.hooks import DistributedHook


class V1Hook(DistributedHook):
    """Reduces what `compute_gradients` returns, so that a user who clips after it clips the global gradients.

    With `hvdx_passes` above 1, gradients are first summed up in variables, one set a rank. `compute_gradients` then
    returns their mean in every pass that ends an update, and zeros in the others, in which `apply_gradients` changes
    nothing: neither variables nor the global step.
    """

    hvdx_passes: int = 1

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        pairs = self._hvdx_filled(list(super().compute_gradients(*args, **kwargs)))  # type: ignore[misc]
        if not pairs:
            return pairs
        gradients, variables = map(list, zip(*pairs, strict=True))
        if self.hvdx_passes == 1:
            reduced = self._hvdx_reduce(gradients, variables)
        else:
            reduced = self._hvdx_accumulate(gradients, variables)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
        pairs = list(grads_and_vars)
        ends_update = self.__dict__.get("hvdx_ends_update")
        if self.hvdx_passes == 1 or ends_update is None:
            return super().apply_gradients(pairs, global_step, name)  # type: ignore[misc]
        update = super().apply_gradients  # type: ignore[misc]

        def apply() -> Any:
            with tf.control_dependencies([update(pairs, global_step, name)]):
                return tf.constant(True)

        return tf.group(tf.cond(ends_update, apply, lambda: tf.constant(False)))

    def _hvdx_accumulate(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the reduced mean of the last passes where this pass ends an update, else zeros."""
        if tf.executing_eagerly():
            raise UnsupportedError(
                "A v1 optimizer accumulates gradients (backward_passes_per_step) in a graph only. In eager code use a "
                "Keras optimizer, or sum the gradients of a tape."
            )
        here = [index for index, gradient in enumerate(gradients) if gradient is not None]
        given = [tf.convert_to_tensor(gradients[index]) for index in here]  # slices become dense
        with tf.init_scope():
            sums = [_local_variable(tf.zeros(variables[i].shape, g.dtype)) for i, g in zip(here, given, strict=True)]
            passes = _local_variable(tf.zeros([], tf.int64))
        with tf.control_dependencies([total.assign_add(g) for total, g in zip(sums, given, strict=True)]):
            number = passes.assign_add(1)
        with tf.control_dependencies([number]):
            totals = [tf.identity(to_tensor(total)) for total in sums]
            self.__dict__["hvdx_ends_update"] = ends_update = tf.equal(tf.identity(number) % self.hvdx_passes, 0)

        def reduce() -> list[Any]:
            means: list[Any] = [None] * len(gradients)
            for index, total in zip(here, totals, strict=True):
                means[index] = total / tf.cast(self.hvdx_passes, total.dtype)
            reduced = self._hvdx_reduce(means, variables)
            present = [value for value in reduced if value is not None]
            with tf.control_dependencies([*present, *totals]):
                cleared = [total.assign(tf.zeros_like(total)) for total in sums]
            with tf.control_dependencies(cleared):
                return [tf.identity(value) for value in present]

        def nothing() -> list[Any]:
            return [tf.zeros_like(total) for total in totals]

        results = in_order(lambda: list(tf.cond(ends_update, reduce, nothing, name="update")), totals, "accumulation")
        found = iter(results)
        filled = self.hvdx_reducer.missing_gradients == "zeros"
        return [next(found) if filled or gradient is not None else None for gradient in gradients]


def _local_variable(initial: Any) -> Any:
    """Return a variable that no checkpoint holds: half an accumulation is given up when training is resumed."""
    local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    return tf.compat.v1.Variable(initial, trainable=False, collections=local, use_resource=True, name="hvdx_sum")


def broadcast_global_variables(root_rank: int = 0) -> Any:
    """Return the operation that overwrites all global variables of the graph with those of one rank; collective.

    Args:
        root_rank: whose values the others get.

    Raises:
        ConfigurationError: `root_rank` is no rank of this world.
        UnsupportedError: TensorFlow is eager, where there are no global variables.
    """
    if tf.executing_eagerly():
        raise UnsupportedError(
            "Eager TensorFlow keeps no list of global variables: use hvd.broadcast_variables(variables), or "
            "hvd.callbacks.BroadcastGlobalVariablesCallback in Keras."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)
