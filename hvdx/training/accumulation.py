"""Gradients of several backward passes, summed up on each rank, so that one update is made with their mean.

Every optimizer but those of Keras 3, which accumulate by themselves, does it in two steps: where its gradients become
global, it gets their reduced mean in each pass that ends an update, and zeros in the others; where it applies them, it
does nothing in those others. So what happens in between (a user's clipping, the finite test of loss scaling) stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdx.comm.order import in_order
from hvdx.ops.convert import to_tensor

Reduce = Callable[[list[Any], list[Any]], list[Any]]


class Accumulation:
    """The sums of the gradients of some variables, and the number of passes they are of.

    In eager code and in functions one object serves all calls and all traces; a v1 graph has objects of its own, one a
    call (see `accumulation_of`).

    Args:
        variables: the variables, in the order in which their gradients will be given.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self._sums: list[Any] = [None] * len(self._variables)
        with tf.init_scope():
            self._passes = _local_variable(tf.zeros([], tf.int64))

    def mean(self, gradients: Sequence[Any], passes: int, reduce: Reduce) -> tuple[list[Any], Any]:
        """Add the gradients of a pass; return the reduced means, and whether this pass ends an update.

        Args:
            gradients: tensors, IndexedSlices (which become dense) or None, one a variable.
            passes: how many make an update.
            reduce: makes means global; takes one for each variable, and the variables. A mean is None where no pass
                had a gradient.

        Returns:
            What `reduce` returned, or zeros in its place where this pass ends no update; and a boolean tensor.
        """
        added = self._added(gradients)
        with tf.control_dependencies(added):
            number = tf.identity(to_tensor(self._passes.assign_add(1)))
        with tf.control_dependencies([number]):
            totals = [None if total is None else tf.identity(to_tensor(total)) for total in self._sums]
            ends_update = tf.equal(number % passes, 0)
        known = [index for index, total in enumerate(totals) if total is not None]
        present: list[int] = []

        def update() -> list[Any]:
            # Uses no variable: in a function TensorFlow orders only what uses the same variables, or none at all.
            means = [None if total is None else total / tf.cast(passes, total.dtype) for total in totals]
            reduced = reduce(means, self._variables)
            present.extend(index for index, value in enumerate(reduced) if value is not None)
            return [tf.identity(reduced[index]) for index in present]

        def nothing() -> list[Any]:
            # `update` has been traced before where it is a graph; in eager code it does not run, and all are zeros.
            return [self._zeros(index, totals[index]) for index in present or known]

        def choose() -> list[Any]:
            return list(tf.cond(ends_update, update, nothing, name="update"))

        results = in_order(choose, [totals[index] for index in known], "accumulation")
        with tf.control_dependencies([*results, self._cleared_where(ends_update, results)]):
            results = [tf.identity(value) for value in results]
        found = dict(zip(present or known, results, strict=True))
        return [found.get(index) for index in range(len(totals))], ends_update

    def _zeros(self, index: int, total: Any) -> Any:
        if total is not None:
            return tf.zeros_like(total)
        variable = self._variables[index]  # which has no gradient, and gets zeros from `reduce`
        return tf.zeros(variable.shape, tf.as_dtype(variable.dtype).base_dtype)

    def _cleared_where(self, ends_update: Any, after: list[Any]) -> Any:
        def clear() -> Any:
            sums = [total for total in self._sums if total is not None]
            with tf.control_dependencies([total.assign(tf.zeros_like(total)) for total in sums]):
                return tf.constant(True)

        with tf.control_dependencies(after):
            return tf.cond(ends_update, clear, lambda: tf.constant(False))

    def _added(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the additions of the gradients to their sums; makes the sums that are not there yet."""
        added = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            dense = tf.convert_to_tensor(gradient)
            if self._sums[index] is None:
                with tf.init_scope():
                    self._sums[index] = _local_variable(tf.zeros(self._variables[index].shape, dense.dtype))
            added.append(self._sums[index].assign_add(dense))
        return added


def accumulation_of(variables: Sequence[Any], lasting: dict[tuple[int, ...], Accumulation]) -> Accumulation:
    """Return the sums to use for an update of these variables.

    Args:
        variables: the variables.
        lasting: those of eager code and functions, which outlast a call. A v1 graph gets new ones.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return Accumulation(variables)
    key = tuple(id(variable) for variable in variables)  # the object holds them, so these stay theirs
    if key not in lasting:
        lasting[key] = Accumulation(variables)
    return lasting[key]


def update_where(ends_update: Any, update: Callable[[], Any]) -> Any:
    """Return the operation that makes the update where this pass ends one, and nothing in other passes."""

    def apply() -> Any:
        with tf.control_dependencies([update()]):
            return tf.constant(True)

    return tf.group(tf.cond(ends_update, apply, lambda: tf.constant(False)))


def _local_variable(initial: Any) -> Any:
    """Return a variable that no checkpoint holds: half an accumulation is given up when training is resumed."""
    local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    return tf.compat.v1.Variable(initial, trainable=False, collections=local, use_resource=True, name="hvdx_sum")
