"""Where each Keras lets the gradients be made global: after accumulation and unscaling, before clipping and update.

Each class here becomes the first base of a wrapped optimizer's class, which holds the reducer; so a copy made by
`from_config` reduces too. What changes is kept in the object's own dictionary, past Keras's attribute tracking.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvdx import world
from hvdx.comm.reduce_op import ReduceOp
from hvdx.errors import OptimizerError, UnsupportedError
from hvdx.graph import in_bare_graph
from hvdx.ops.sparse import times
from hvdx.ops.xla import refuse_inside_xla
from hvdx.training.accumulation import accumulation_of, update_where
from hvdx.training.graphs import in_program_order
from hvdx.training.reducer import GradientReducer
from hvdx.training.under_strategy import (
    are_global,
    gradients_in_hand,
    may_be_equal,
    op_of_gradients,
    reduces_by_itself,
)


class DistributedHook:
    """What every wrapped optimizer has."""

    hvdx_reducer: GradientReducer
    hvdx_passes: int = 1  # of which hvdx makes one update; Keras 3 accumulates by itself

    def _hvdx_hands_over(self) -> bool:
        """Return whether a strategy reduces the gradients of this replica, so that no hook must.

        Raises:
            UnsupportedError: it does not do what this optimizer was wrapped for.
        """
        if not reduces_by_itself():
            return False
        asked = "" if self.hvdx_reducer.op in (ReduceOp.AVERAGE, ReduceOp.SUM) else f"op={self.hvdx_reducer.op.name}"
        asked = f"backward_passes_per_step={self.hvdx_passes}" if self.hvdx_passes > 1 else asked
        if asked:
            raise UnsupportedError(
                f"The strategy of this replica sums up the gradients of its devices before {type(self).__name__} sees "
                f"them, once a pass. Received: {asked}, which needs one device a rank: use "
                'strategy("multi_worker"), or none.'
            )
        return True

    @property
    def _hvdx_reductions(self) -> int:
        """How often the hook has run; in a graph, how often it was traced."""
        return int(self.__dict__.get("hvdx_reductions", 0))

    def _hvdx_reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        refuse_inside_xla()
        self.__dict__["hvdx_reductions"] = self._hvdx_reductions + 1
        op = op_of_gradients(self.hvdx_reducer.op)
        if op is ReduceOp.SUM and are_global() and not self._hvdx_accumulates():
            return [None if gradient is None else times(gradient, world.size()) for gradient in gradients]
        return replace(self.hvdx_reducer, op=op, warns=not may_be_equal()).reduce(gradients, variables)

    def _hvdx_accumulates(self) -> bool:
        """Return whether the gradients of an update may be those of several passes, of which this is the last."""
        return self.hvdx_passes > 1 or bool(getattr(self, "gradient_accumulation_steps", None))

    def _hvdx_global(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the reduced gradients; with accumulation, their mean where this pass ends an update, else zeros."""
        if self.hvdx_passes == 1:
            return self._hvdx_reduce(gradients, variables)
        sums = accumulation_of(variables, self.__dict__.setdefault("hvdx_sums", {}))
        reduced, ends_update = sums.mean(gradients, self.hvdx_passes, self._hvdx_reduce)
        self.__dict__["hvdx_ends_update"] = ends_update
        return reduced

    def _hvdx_apply(self, update: Callable[[], Any]) -> Any:
        """Make the update with reduced gradients; with accumulation, only where they end one."""
        ends_update = self.__dict__.pop("hvdx_ends_update", None)
        if ends_update is None:
            return update()
        done = update_where(ends_update, update)
        return self.iterations if tf.executing_eagerly() else done  # type: ignore[attr-defined]

    def _hvdx_check_reduced(self, before: int) -> None:
        """Raise where an update was made and the hook did not run: Keras has changed, or a subclass skips it."""
        if self._hvdx_reductions == before:
            raise OptimizerError(
                f"{type(self).__name__} made an update without reducing the gradients: the ranks would train different "
                "models. Its class overrides the method where hvdx reduces; wrap a stock optimizer, or use "
                "hvd.DistributedGradientTape."
            )

    def _hvdx_filled(self, pairs: list[Any]) -> list[Any]:
        """Return pairs of gradients and variables with zeros where that is asked for: Keras drops what is None."""
        if self.hvdx_reducer.missing_gradients != "zeros":
            return pairs
        return [(tf.zeros_like(v) if g is None else g, v) for g, v in pairs]

    @contextlib.contextmanager
    def _hvdx_given(self, pairs: list[Any]) -> Iterator[None]:
        """Note all pairs of an update: the hook runs after Keras has dropped those without a gradient."""
        outer = self.__dict__.get("hvdx_pairs", [])
        self.__dict__["hvdx_pairs"] = pairs
        try:
            with gradients_in_hand():
                yield
        finally:
            self.__dict__["hvdx_pairs"] = outer

    def _hvdx_has_nothing(self, pairs: list[Any]) -> bool:
        """Tell the other ranks if this one has no gradient at all, and return whether the update ends here.

        Keras raises then while it traces, and the others would wait for a rank that never comes.
        """
        if world.size() == 1 or not pairs or any(gradient is not None for gradient, _ in pairs):
            return False
        self._hvdx_reduce(*zip(*pairs, strict=True))
        if tf.executing_eagerly():
            return False  # no rank has any, else that has raised: now Keras may say so
        tf.debugging.Assert(False, ["No gradients provided for any variable, on any rank."])
        return True

    def _hvdx_reduce_pairs(self, pairs: list[Any]) -> list[Any]:
        """Return the pairs with reduced gradients; the other ranks hear of variables that were dropped before."""
        kept = {id(variable): gradient for gradient, variable in pairs}
        given = [v for g, v in self.__dict__.get("hvdx_pairs", []) if g is None or id(v) in kept]
        # In the order in which they were given, so that the place of a missing one is the same on every rank.
        variables = given if len(given) >= len(pairs) else [variable for _, variable in pairs]
        if not variables:
            return []
        reduced = self._hvdx_global([kept.get(id(variable)) for variable in variables], variables)
        found = {id(variable): gradient for gradient, variable in zip(reduced, variables, strict=True)}
        return [(found[id(variable)], variable) for _, variable in pairs]


class _Copied:
    """Copies an object of Keras 3 as Keras does, by its saved form, which is plain; and lets the copy reduce."""

    def __copy__(self) -> Any:
        saved: Any = self.__reduce__()
        clone = saved[0](*saved[1])
        clone.__class__ = type(self)
        return clone

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()


class Keras3Hook(_Copied, DistributedHook):
    """`_clip_gradients` of Keras 3: called once an update, on the averaged accumulation of all micro-batches."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        if self._hvdx_hands_over():
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        grads = list(grads)
        known = trainable_variables if trainable_variables is not None else self.__dict__["_trainable_variables"]
        known = list(known)
        if len(grads) != len(known):
            return super().apply(grads, trainable_variables)  # type: ignore[misc]  # which raises
        pairs = self._hvdx_filled(list(zip(grads, known, strict=True)))
        if self._hvdx_has_nothing(pairs):
            return None
        before = self._hvdx_reductions
        with self._hvdx_given(pairs):
            result = super().apply([g for g, _ in pairs], trainable_variables)  # type: ignore[misc]
        if any(grad is not None for grad, _ in pairs) and self._hvdx_updated():
            self._hvdx_check_reduced(before)
        return result

    def _hvdx_updated(self) -> bool:
        """Return whether the call of `apply` that ends here made an update; a graph contains one in any case."""
        steps = getattr(self, "gradient_accumulation_steps", None)
        return not steps or not tf.executing_eagerly() or int(self._iterations) % steps == 0  # type: ignore[attr-defined]

    def _clip_gradients(self, grads: Any) -> Any:
        if self._hvdx_hands_over():
            return super()._clip_gradients(grads)  # type: ignore[misc]
        return super()._clip_gradients(self._hvdx_reduce_filtered(list(grads)))  # type: ignore[misc]

    def _hvdx_reduce_filtered(self, grads: list[Any]) -> list[Any]:
        """Reduce what Keras left after it dropped gradients that are None."""
        present = [variable for gradient, variable in self.__dict__["hvdx_pairs"] if gradient is not None]
        if len(present) != len(grads):
            raise OptimizerError(
                f"{type(self).__name__} got {len(present)} gradients and reduces {len(grads)}: variables that are "
                "overwritten by their gradient (float8 training) are not supported under several ranks."
            )
        return [gradient for gradient, _ in self._hvdx_reduce_pairs(list(zip(grads, present, strict=True)))]


class MultiHook(_Copied, DistributedHook):
    """`apply` of Keras 3's MultiOptimizer, which hands the gradients out to others; it clips and accumulates nothing.

    Where one of the others accumulates, every micro-batch travels: the mean of sums is the sum of means.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        if self._hvdx_hands_over():
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        grads = list(grads)
        known = trainable_variables if trainable_variables is not None else self.__dict__["_trainable_variables"]
        known = list(known)
        if len(grads) == len(known) > 0:
            grads = self._hvdx_reduce(grads, known)
        with gradients_in_hand():
            return super().apply(grads, trainable_variables)  # type: ignore[misc]


class Keras2Hook(DistributedHook):
    """`aggregate_gradients` of tf_keras and Keras 2: called once an update, before the finite test of loss scaling."""

    def apply_gradients(
        self, grads_and_vars: Any, name: Any = None, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        if self._hvdx_hands_over():
            given = {"skip_gradients_aggregation": skip_gradients_aggregation, **kwargs}
            return super().apply_gradients(grads_and_vars, name, **given)  # type: ignore[misc]
        pairs = self._hvdx_filled(list(grads_and_vars))
        skips = skip_gradients_aggregation or not kwargs.get("experimental_aggregate_gradients", True)
        if not skips and self._hvdx_has_nothing(pairs):
            return self.iterations  # type: ignore[attr-defined]
        before = self._hvdx_reductions
        update = super().apply_gradients  # type: ignore[misc]
        with self._hvdx_given(pairs):
            if not skips and (self.hvdx_passes > 1 or in_bare_graph()):
                return self._hvdx_aggregate_and_apply(pairs, name)
            result = self._hvdx_apply(lambda: update(pairs, name=name, skip_gradients_aggregation=skips))
        if not skips and any(gradient is not None for gradient, _ in pairs):
            self._hvdx_check_reduced(before)
        return result

    def _hvdx_aggregate_and_apply(self, pairs: list[Any], name: Any) -> Any:
        """Do in two steps what Keras does in one, as loss scaling does: what is in the second may not come to be."""
        with tf.init_scope():
            self.build([variable for _, variable in pairs])  # type: ignore[attr-defined]
        reduced = list(self.aggregate_gradients(pairs))
        apply = super().apply_gradients  # type: ignore[misc]

        def update() -> Any:
            return apply(reduced, name=name, skip_gradients_aggregation=True)

        return self._hvdx_apply((lambda: in_program_order(update)) if in_bare_graph() else update)

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        if self._hvdx_hands_over():
            return super().aggregate_gradients(grads_and_vars)  # type: ignore[misc]
        return self._hvdx_reduce_pairs(list(super().aggregate_gradients(grads_and_vars) or []))  # type: ignore[misc]


class LegacyHook(DistributedHook):
    """`_aggregate_gradients` of the legacy optimizers."""

    def apply_gradients(
        self, grads_and_vars: Any, name: Any = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        if self._hvdx_hands_over():
            return super().apply_gradients(grads_and_vars, name, experimental_aggregate_gradients)  # type: ignore[misc]
        pairs = self._hvdx_filled(list(grads_and_vars))
        reduces = experimental_aggregate_gradients
        if reduces and self._hvdx_has_nothing(pairs):
            return self.iterations  # type: ignore[attr-defined]
        before = self._hvdx_reductions
        update = super().apply_gradients  # type: ignore[misc]
        with self._hvdx_given(pairs):
            if reduces and self.hvdx_passes > 1:
                return self._hvdx_aggregate_and_apply(pairs, name)
            result = self._hvdx_apply(lambda: update(pairs, name, reduces))
        if reduces and any(gradient is not None for gradient, _ in pairs):
            self._hvdx_check_reduced(before)
        return result

    def _hvdx_aggregate_and_apply(self, pairs: list[Any], name: Any) -> Any:
        """Do in two steps what Keras does in one, as loss scaling does: the second may not come to be."""
        with tf.init_scope():
            self._create_all_weights([variable for _, variable in pairs])  # type: ignore[attr-defined]
        local = self._transform_unaggregated_gradients(pairs)  # type: ignore[attr-defined]
        reduced = list(self._aggregate_gradients(local))
        apply = super().apply_gradients  # type: ignore[misc]
        return self._hvdx_apply(lambda: apply(reduced, name, False))

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        if self._hvdx_hands_over():
            return super()._aggregate_gradients(grads_and_vars)  # type: ignore[misc]
        return self._hvdx_reduce_pairs(list(super()._aggregate_gradients(grads_and_vars)))  # type: ignore[misc]
