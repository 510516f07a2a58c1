"""The update of a Keras optimizer, of any family, as an operation of a v1 graph."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdx import keras_api
from hvdx.errors import UnsupportedError
from hvdx.keras_api import Family
from hvdx.training.accumulation import Accumulation, update_where
from hvdx.training.graphs import in_program_order


class OptimizerRecipe(NamedTuple):
    """How to make an optimizer anew in each graph."""

    kind: type
    config: dict[str, Any]


def optimizer_recipe(optimizer: Any) -> OptimizerRecipe:
    """Return the class and the present settings of an optimizer, which can be read outside of graphs only.

    Raises:
        UnsupportedError: it scales the loss.
        OptimizerError: it is no Keras optimizer.
    """
    if keras_api.is_loss_scale_optimizer(optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__} scales the loss, which an Estimator of a Keras model does not do; compile the "
            "model with the optimizer inside it and without the policy mixed_float16, or use model.fit."
        )
    keras_api.family(optimizer)
    return OptimizerRecipe(type(optimizer), optimizer.get_config())


def update(recipe: OptimizerRecipe, loss: Any, variables: Sequence[Any]) -> Any:
    """Return the operation that makes one update with a copy of the optimizer and increments the global step.

    A copy of a distributed optimizer is distributed, for `from_config` keeps the class.

    Args:
        recipe: of the optimizer of the compiled model, which is left as it is.
        loss: scalar tensor.
        variables: what is trained.
    """
    optimizer = recipe.kind.from_config(copy.deepcopy(recipe.config))  # type: ignore[attr-defined]
    pairs = list(zip(tf.gradients(loss, variables), variables, strict=True))
    if keras_api.family(optimizer) is Family.LEGACY:
        _count_global_step(optimizer)
        return optimizer.apply_gradients(pairs)
    _forget(optimizer.iterations)
    _count_global_step(optimizer)
    return _update_in_function(optimizer, pairs)


def _count_global_step(optimizer: Any) -> None:
    """Let the optimizer increment the global step instead of a counter of its own; its schedule reads it, too."""
    optimizer.iterations = tf.compat.v1.train.get_global_step()
    rate = getattr(optimizer, "_current_learning_rate", None)
    if rate is not None:
        # Its first value was computed from the counter, which would have to be initialized before it. It is assigned
        # anew in each update, so that any first value does.
        _forget(rate)
        optimizer._current_learning_rate = tf.Variable(
            tf.zeros(rate.shape, rate.dtype), trainable=False, name="current_learning_rate"
        )


def _forget(variable: Any) -> None:
    """Neither initialize nor save a variable that is not used."""
    variables = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    variables[:] = [other for other in variables if other is not variable]


def update_keras_3(recipe: OptimizerRecipe, loss: Any, variables: Sequence[Any]) -> tuple[Any, Any]:
    """Return the operation that makes one update and increments the global step, and the Keras 3 optimizer in it.

    Gradients become global in the graph, where collectives are ordered for the session, and are applied by an optimizer
    of the class that was there before it was wrapped.

    Args:
        recipe: of the optimizer of the compiled model, which is left as it is.
        loss: scalar tensor.
        variables: what is trained, as Keras's objects.
    """
    plain: Any = next(cls for cls in recipe.kind.__mro__ if hasattr(cls, "from_config") and not _reduces(cls))
    config = copy.deepcopy(recipe.config)
    passes = config.pop("gradient_accumulation_steps", None) or 1  # whose sums would be saved, and counted as updates
    optimizer = plain.from_config(config)
    optimizer.build(variables)
    values = [variable.value for variable in variables]
    gradients, ends_update = _made_global(recipe.kind, passes, tf.gradients(loss, values), values)

    def make_update() -> Any:
        with tf.control_dependencies([in_program_order(lambda: optimizer.apply(gradients, variables))]):
            return tf.compat.v1.assign_add(tf.compat.v1.train.get_global_step(), 1).op

    return (make_update() if ends_update is None else update_where(ends_update, make_update)), optimizer


def _made_global(kind: Any, passes: int, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], Any]:
    """Return the gradients reduced, or their mean over some passes, and whether that ends an update (None: always)."""

    def reduce(local: list[Any], about: list[Any]) -> list[Any]:
        return list(kind.hvdx_reducer.reduce(local, about)) if _reduces(kind) else local

    if passes == 1:
        return reduce(gradients, variables), None
    return Accumulation(variables).mean(gradients, passes, reduce)


def _reduces(kind: type) -> bool:
    return hasattr(kind, "hvdx_reducer") or kind.__module__.startswith("hvdx.")


def _update_in_function(optimizer: Any, pairs: list[Any]) -> Any:
    """Return the update of a new optimizer, whose lines are meant to be executed one after the other."""
    optimizer.build([variable for _, variable in pairs])
    pairs = list(optimizer.aggregate_gradients(pairs))
    return in_program_order(lambda: optimizer.apply_gradients(pairs, skip_gradients_aggregation=True))
