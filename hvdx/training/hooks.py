"""Where each Keras lets the gradients be made global: after accumulation and unscaling, before clipping and update.

Each class here becomes the first base of a wrapped optimizer's class, which holds the reducer; so a copy made by
`from_config` reduces too. What changes is kept in the object's own dictionary, past Keras's attribute tracking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdx.errors import OptimizerError
from hvdx.training.reducer import GradientReducer
from hvdx.training.xla import refuse_inside_xla


class DistributedHook:
    """What every wrapped optimizer has."""

    hvdx_reducer: GradientReducer

    @property
    def _hvdx_reductions(self) -> int:
        """How often the hook has run; in a graph, how often it was traced."""
        return int(self.__dict__.get("hvdx_reductions", 0))

    def _hvdx_reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        refuse_inside_xla()
        self.__dict__["hvdx_reductions"] = self._hvdx_reductions + 1
        return self.hvdx_reducer.reduce(gradients, variables)

    def _hvdx_check_reduced(self, before: int) -> None:
        """Raise where an update was made and the hook did not run: Keras has changed, or a subclass skips it."""
        if self._hvdx_reductions == before:
            raise OptimizerError(
                f"{type(self).__name__} made an update without reducing the gradients: the ranks would train different "
                "models. Its class overrides the method where hvdx reduces; wrap a stock optimizer, or use "
                "hvd.DistributedGradientTape."
            )


class Keras3Hook(DistributedHook):
    """`_clip_gradients` of Keras 3: called once an update, on the averaged accumulation of all micro-batches."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        state = self.__dict__
        variables = list(trainable_variables if trainable_variables is not None else state["_trainable_variables"])
        if self.hvdx_reducer.missing_gradients == "zeros" and len(variables) == len(grads):
            grads = [tf.zeros_like(v) if g is None else g for g, v in zip(grads, variables, strict=True)]
        outer, before = state.get("hvdx_pending"), self._hvdx_reductions
        state["hvdx_pending"] = (grads, variables)
        try:
            result = super().apply(grads, trainable_variables)  # type: ignore[misc]
        finally:
            state["hvdx_pending"] = outer
        if any(grad is not None for grad in grads) and self._hvdx_updated():
            self._hvdx_check_reduced(before)
        return result

    def _hvdx_updated(self) -> bool:
        """Return whether the call of `apply` that ends here made an update; a graph contains one in any case."""
        steps = getattr(self, "gradient_accumulation_steps", None)
        return not steps or not tf.executing_eagerly() or int(self._iterations) % steps == 0  # type: ignore[attr-defined]

    def _clip_gradients(self, grads: Any) -> Any:
        return super()._clip_gradients(self._hvdx_reduce_filtered(list(grads)))  # type: ignore[misc]

    def _hvdx_reduce_filtered(self, grads: list[Any]) -> list[Any]:
        """Reduce what Keras left after it dropped gradients that are None; tell the ranks which were dropped."""
        given, variables = self.__dict__["hvdx_pending"]
        present = [v for g, v in zip(given, variables, strict=False) if g is not None]
        if len(present) != len(grads):
            raise OptimizerError(
                f"{type(self).__name__} got {len(present)} gradients and reduces {len(grads)}: variables that are "
                "overwritten by their gradient (float8 training) are not supported under several ranks."
            )
        slots = iter(grads)
        everything = [None if g is None else next(slots) for g in given]
        reduced = self._hvdx_reduce(everything, variables)
        return [r for r, g in zip(reduced, given, strict=True) if g is not None]


class Keras2Hook(DistributedHook):
    """`aggregate_gradients` of tf_keras and Keras 2: called once an update, before the finite test of loss scaling."""

    def apply_gradients(
        self, grads_and_vars: Any, name: Any = None, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        pairs = list(grads_and_vars)
        before = self._hvdx_reductions
        skip = skip_gradients_aggregation or not kwargs.get("experimental_aggregate_gradients", True)
        result = super().apply_gradients(  # type: ignore[misc]
            pairs, name=name, skip_gradients_aggregation=skip_gradients_aggregation, **kwargs
        )
        if not skip and any(grad is not None for grad, _ in pairs):
            self._hvdx_check_reduced(before)
        return result

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        pairs = list(super().aggregate_gradients(grads_and_vars) or [])  # type: ignore[misc]
        return _reduce_pairs(self, pairs)


class LegacyHook(DistributedHook):
    """`_aggregate_gradients` of the legacy optimizers."""

    def apply_gradients(
        self, grads_and_vars: Any, name: Any = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        pairs = list(grads_and_vars)
        state = self.__dict__
        if self.hvdx_reducer.missing_gradients == "zeros":
            pairs = [(tf.zeros_like(v) if g is None else g, v) for g, v in pairs]
        before, state["hvdx_pending"] = self._hvdx_reductions, pairs
        try:
            result = super().apply_gradients(pairs, name, experimental_aggregate_gradients)  # type: ignore[misc]
        finally:
            state["hvdx_pending"] = None
        if experimental_aggregate_gradients and any(grad is not None for grad, _ in pairs):
            self._hvdx_check_reduced(before)
        return result

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """Reduce; gradients that are None were dropped before, but the other ranks must hear of them."""
        slots = list(super()._aggregate_gradients(grads_and_vars))  # type: ignore[misc]
        missing = [pair for pair in self.__dict__.get("hvdx_pending") or [] if pair[0] is None]
        return [pair for pair in _reduce_pairs(self, slots + missing) if pair[0] is not None]


def _reduce_pairs(optimizer: DistributedHook, pairs: list[Any]) -> list[Any]:
    if not pairs:
        return []
    gradients, variables = zip(*pairs, strict=True)
    return list(zip(optimizer._hvdx_reduce(gradients, variables), variables, strict=True))
