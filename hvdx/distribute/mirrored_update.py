"""An optimizer's update in one replica of several: the gradients are reduced once, then every replica does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.values import DistributedValues, DistributedVariable

from hvdx import keras_api, world
from hvdx.comm.reduce_op import ReduceOp
from hvdx.distribute.cross_device import regrouped
from hvdx.errors import OptimizerError, UnsupportedError
from hvdx.training.reducer import GradientReducer
from hvdx.training.under_strategy import gradients_in_hand


def update_in_replica(extended: Any, update: Callable[..., Any], optimizer: Any, gradients: Any, variables: Any) -> Any:
    """Reduce the gradients of a replica over all devices and ranks, and make its update with them; collective.

    Args:
        extended: that of the strategy.
        update: the optimizer's own way, which takes the optimizer and the following.
        optimizer: the outermost one.
        gradients: tensors, IndexedSlices or None, one a variable.
        variables: the variables, or None for those the optimizer was built with.

    Raises:
        OptimizerError: the optimizer was made outside of the strategy's scope.
        UnsupportedError: a variable is not updated with its gradient, but overwritten by it.
        GradientError: a gradient is None on some ranks only.
    """
    gradients = list(gradients)
    known = list(variables if variables is not None else optimizer._trainable_variables)
    _check(optimizer, known)
    if gradients and len(gradients) == len(known):  # else the optimizer raises
        reducer = _reducer_of(optimizer, extended.hvdx_ops.threshold)

        def reduce(strategy: Any, values: list[Any]) -> list[Any]:
            return _reduced(extended, reducer, values, known)

        gradients = tf.distribute.get_replica_context().merge_call(reduce, args=(gradients,))
    with gradients_in_hand():
        return update(optimizer, gradients, None if variables is None else known)


def _reduced(extended: Any, reducer: GradientReducer, values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    devices = extended.worker_devices
    places = [place for place, value in enumerate(values) if value is not None]
    parts = [_parts(values[place], len(devices)) for place in places]

    def between(totals: list[Any]) -> list[Any]:
        local: list[Any] = [None] * len(values)
        for place, total in zip(places, totals, strict=True):
            local[place] = total
        results = reducer.reduce(local, variables)
        places[:] = [place for place, result in enumerate(results) if result is not None]
        return [results[place] for place in places]

    alone = world.size() == 1 and reducer.missing_gradients == "error" and reducer.sparse_as_dense is not True
    sums = extended.hvdx_ops.sums(parts, [devices] * len(parts), None if alone else between)
    results: list[Any] = [None] * len(values)
    for place, copies in zip(places, sums, strict=True):
        results[place] = regrouped(copies)
    return results


def _parts(value: Any, count: int) -> Sequence[Any]:
    """Return a value's parts, one a device; what is one object for all replicas counts once in each."""
    return value.values if isinstance(value, DistributedValues) else [value] * count


def _reducer_of(optimizer: Any, threshold: int | None) -> GradientReducer:
    """Return how ranks reduce: as the optimizer was wrapped, if it was; the sum, as losses are divided before."""
    wrapped = getattr(type(keras_api.inner_optimizer(optimizer)), "hvdx_reducer", None)
    return replace(wrapped or GradientReducer(fusion_threshold=threshold), op=ReduceOp.SUM)


def _check(optimizer: Any, variables: Sequence[Any]) -> None:
    for one in _with_inner(optimizer):
        if not isinstance(getattr(one.iterations, "value", None), DistributedVariable):
            raise OptimizerError(
                f"{type(one).__name__} was made outside of the strategy's scope, so that its variables are not one a "
                "device. Make the optimizer, and call model.compile, inside `with strategy.scope():`."
            )
    if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
        raise UnsupportedError(
            f"{type(optimizer).__name__} has variables that are overwritten by their gradient (float8 training), which "
            'strategy("mirrored") does not support. Use another dtype policy.'
        )


def _with_inner(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, and those that it hands its gradients to."""
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    for one in [inner] if inner is not None else getattr(optimizer, "optimizers", []):
        yield from _with_inner(one)
