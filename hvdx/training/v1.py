"""`compute_gradients` of v1 optimizers (`tf.compat.v1.train.Optimizer`): where their gradients become global."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdx.errors import UnsupportedError
from hvdx.ops.broadcast import broadcast_variables
from hvdx.training.accumulation import update_where
from hvdx.training.hooks import DistributedHook
from hvdx.training.under_strategy import gradients_in_hand


class V1Hook(DistributedHook):
    """Reduces what `compute_gradients` returns, so that a user who clips after it clips the global gradients.

    With accumulation it returns zeros in the passes that end no update, in which `apply_gradients` changes nothing:
    neither variables nor the global step.
    """

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        if self._hvdx_hands_over():
            return super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        pairs = self._hvdx_filled(list(super().compute_gradients(*args, **kwargs)))  # type: ignore[misc]
        if not pairs:
            return pairs
        gradients, variables = map(list, zip(*pairs, strict=True))
        return list(zip(self._hvdx_global(gradients, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
        pairs = list(grads_and_vars)
        update = super().apply_gradients  # type: ignore[misc]
        if not self._hvdx_hands_over():
            update = _in_hand(update)
        ends_update = self.__dict__.get("hvdx_ends_update")  # which stays, for the pairs may be applied in parts
        if ends_update is None:
            return update(pairs, global_step, name)
        return update_where(ends_update, lambda: update(pairs, global_step, name))


def _in_hand(update: Any) -> Any:
    """Return the update as it is where `compute_gradients` has reduced: a strategy must not do it again."""

    def once(*args: Any) -> Any:
        with gradients_in_hand():
            return update(*args)

    return once


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
