"""An optimizer's update in one replica of several: the gradients are reduced once, then every replica does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.values import DistributedValues, DistributedVariable

from hvdx import keras_api, world
from hvdx.comm.reduce_op import ReduceOp
from hvdx.distribute.cross_device import divided, regrouped
from hvdx.errors import OptimizerError, UnsupportedError
from hvdx.ops.sparse import times
from hvdx.training.reducer import GradientReducer
from hvdx.training.under_strategy import are_global, gradients_in_hand, may_be_equal


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
        reducer = replace(_reducer_of(optimizer, extended.hvdx_ops.threshold), warns=not may_be_equal())
        sums = _sums_of(optimizer, known)

        def reduce(strategy: Any, values: list[Any]) -> list[Any]:
            if sums is None:
                return _reduced(extended, reducer, values, known)
            return _reduced_where_due(extended, reducer, values, known, optimizer, sums)

        if sums is None and are_global():
            gradients = [None if one is None else times(one, extended._num_replicas_in_sync) for one in gradients]
        else:
            gradients = tf.distribute.get_replica_context().merge_call(reduce, args=(gradients,))
    with gradients_in_hand():
        return update(optimizer, gradients, None if variables is None else known)


def reduce_in_replica(
    extended: Any, gradients: Sequence[Any], variables: Sequence[Any], reducer: GradientReducer
) -> list[Any]:
    """Return the gradients of a replica reduced over all devices and ranks; collective.

    Args:
        extended: that of the strategy.
        gradients: tensors, IndexedSlices or None, one a variable.
        variables: what they belong to.
        reducer: how; Average or Sum.

    Raises:
        UnsupportedError: another operation.
        GradientError: a gradient is None on some ranks only.
    """
    if reducer.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise UnsupportedError(
            'Under strategy("mirrored") gradients are summed up or averaged over the devices. Received: '
            f"op={reducer.op.name}."
        )
    total = replace(reducer, op=ReduceOp.SUM)

    def reduce(strategy: Any, values: list[Any]) -> list[Any]:
        return _reduced(extended, total, values, variables)

    sums = tf.distribute.get_replica_context().merge_call(reduce, args=(list(gradients),))
    if reducer.op is ReduceOp.SUM:
        return list(sums)
    return [None if value is None else divided(value, extended._num_replicas_in_sync) for value in sums]


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


def _sums_of(optimizer: Any, variables: Sequence[Any]) -> list[Any] | None:
    """Return the variables in which an optimizer sums up gradients, one a variable; None where it does not.

    Those inside a LossScaleOptimizer are not told: it tests the gradients of every pass, which are reduced for that.
    """
    if not getattr(optimizer, "gradient_accumulation_steps", None) or optimizer.loss_scale_factor is not None:
        return None
    keras_api.build_optimizer(optimizer, variables)
    found = [optimizer._accumulated_gradients[optimizer._get_variable_index(variable)] for variable in variables]
    return [getattr(variable, "value", variable) for variable in found]


def _reduced_where_due(
    extended: Any, reducer: GradientReducer, values: Sequence[Any], variables: Sequence[Any], optimizer: Any, sums: Any
) -> list[Any]:
    """Return what the optimizer is to add to its sums: the reduced total where this pass ends an update, else its own.

    Each device sums up its own gradients. Where an update is due, they are reduced with the gradients of this pass, and
    cleared, so that the optimizer finds the total of all passes as the last pass's gradient.
    """
    devices = extended.worker_devices
    places = [place for place, value in enumerate(values) if value is not None]
    local, totals = [], []
    for place in places:
        parts = _on_each(devices, _parts(values[place], len(devices)), tf.convert_to_tensor)
        local += parts
        pairs = list(zip(parts, sums[place].values, strict=True))
        totals += _on_each(devices, pairs, lambda pair: pair[0] + tf.convert_to_tensor(pair[1]))
    due = tf.equal((tf.convert_to_tensor(optimizer._iterations) + 1) % optimizer.gradient_accumulation_steps, 0)

    def reduced() -> list[Any]:
        # Uses no variable: in a function TensorFlow orders only what uses the same variables, or none at all.
        given: list[Any] = [None] * len(values)
        for number, place in enumerate(places):
            given[place] = regrouped(totals[number * len(devices) : (number + 1) * len(devices)])
        found = _reduced(extended, reducer, given, variables)
        return [tf.identity(part) for place in places for part in _parts(found[place], len(devices))]

    parts = list(tf.cond(due, reduced, lambda: [tf.identity(part) for part in local]))
    with tf.control_dependencies(parts):
        cleared = tf.cond(due, lambda: _cleared([sums[place] for place in places]), lambda: tf.constant(False))
    with tf.control_dependencies([cleared]):
        parts = [tf.identity(part) for part in parts]
    results: list[Any] = [None] * len(values)
    for number, place in enumerate(places):
        results[place] = regrouped(parts[number * len(devices) : (number + 1) * len(devices)])
    return results


def _cleared(sums: Sequence[Any]) -> Any:
    done = [part.assign(tf.zeros_like(part)) for total in sums for part in total.values]
    with tf.control_dependencies(done):
        return tf.constant(True)


def _on_each(devices: Sequence[str], parts: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    results = []
    for part, device in zip(parts, devices, strict=True):
        with tf.device(device):
            results.append(function(part))
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
        if not isinstance(getattr(one._iterations, "value", None), DistributedVariable):
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
