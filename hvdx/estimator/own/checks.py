"""Checks of what a caller hands in that several files here need: argument names, hooks, listeners, tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigurationError
from hvdx.graph import operations_behind


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the named parameters that a call of `function` may still fill, without `self` and without `*args`."""
    if isinstance(function, functools.partial):
        inner = list(parameters_of(function.func).items())[len(function.args) :]
        return {name: parameter for name, parameter in inner if name not in function.keywords}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(function).parameters.items() if p.kind in named}


def check_hooks(hooks: Iterable[Any] | None, owner: str) -> tuple[tf.compat.v1.train.SessionRunHook, ...]:
    """Return the hooks as a tuple.

    Raises:
        ConfigurationError: one of them is no SessionRunHook.
    """
    return _all_of(hooks, tf.compat.v1.train.SessionRunHook, f"hooks of {owner}", "tf.compat.v1.train.SessionRunHook")


def check_listeners(listeners: Iterable[Any] | None, owner: str) -> tuple[Any, ...]:
    """Return the checkpoint listeners as a tuple.

    Raises:
        ConfigurationError: one of them is no CheckpointSaverListener.
    """
    kind = tf.compat.v1.train.CheckpointSaverListener
    return _all_of(listeners, kind, f"saving_listeners of {owner}", "tf.compat.v1.train.CheckpointSaverListener")


def check_positive(value: Any, name: str) -> None:
    """Refuse a number of steps that is given and not above zero.

    Raises:
        ConfigurationError: the number is zero or negative.
    """
    if value is not None and value <= 0:
        raise ConfigurationError(f"{name} must be above 0, or None for no limit; received {value!r}.")


def check_tensor(value: Any, name: str, or_operation: bool = False) -> Any:
    """Return `value`, a tensor or variable (or an operation) of the graph that is being built.

    Raises:
        ConfigurationError: it is something else, or belongs to another graph.
    """
    kinds: tuple[type, ...] = (tf.Tensor, tf.Variable)
    if or_operation:
        kinds = (*kinds, tf.Operation)
    if not isinstance(value, kinds):
        wanted = "a tensor or an operation" if or_operation else "a tensor"
        raise ConfigurationError(f"{name} must be {wanted}; received {value!r} of type {type(value).__name__}.")
    tensor: Any = value
    if not tf.executing_eagerly() and tensor.graph is not tf.compat.v1.get_default_graph():
        raise ConfigurationError(
            f"{name} ({tensor.name!r}) belongs to another graph. Make it anew in every call of model_fn: "
            "train, evaluate and predict each build a graph of their own."
        )
    return tensor


def needed_placeholders(outputs: Iterable[Any], fed: Iterable[Any] = ()) -> list[str]:
    """Return the names of the placeholders that tensors and operations need to be computed, without those that are fed.

    Args:
        outputs: tensors or operations of one graph.
        fed: tensors that are known, behind which nothing is looked at.
    """
    return [operation.name for operation in operations_behind(outputs, fed) if operation.type == "Placeholder"]


def _all_of(values: Iterable[Any] | None, kind: type, name: str, kind_name: str) -> tuple[Any, ...]:
    try:
        found = tuple(values or ())
    except TypeError:
        raise ConfigurationError(f"The {name} must be a list; received {values!r}.") from None
    for value in found:
        if not isinstance(value, kind):
            raise ConfigurationError(
                f"The {name} must be objects of {kind_name}; received {value!r} of type {type(value).__name__}."
            )
    return found
