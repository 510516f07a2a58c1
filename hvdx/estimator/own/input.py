"""The input of an Estimator: calling the input_fn and turning what it returns into features and labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigurationError

from .checks import parameters_of

InputContext = tf.distribute.InputContext


def call_input_fn(input_fn: Callable[..., Any], mode: str, params: Any, config: Any) -> Any:
    """Return what the input_fn returns, called with those of mode, params, config and input_context that it takes.

    An `input_context` with a default keeps it, for one process has nothing to tell in it; one without a default gets
    the context of a single pipeline.

    Raises:
        ConfigurationError: no function, or it returned None.
    """
    if not callable(input_fn):
        raise ConfigurationError(f"input_fn must be a function that returns a tf.data.Dataset; received {input_fn!r}.")
    parameters = parameters_of(input_fn)
    offered = {"mode": mode, "params": params, "config": config}
    arguments = {name: value for name, value in offered.items() if name in parameters}
    if "input_context" in parameters and parameters["input_context"].default is parameters["input_context"].empty:
        arguments["input_context"] = InputContext()
    with tf.compat.v1.device("/cpu:0"):
        result = input_fn(**arguments)
    if result is None:
        raise ConfigurationError(
            f"input_fn {input_fn!r} returned None. Return a tf.data.Dataset, or tensors (features, labels); "
            "is a `return` missing?"
        )
    return result


def features_and_labels(result: Any) -> tuple[Any, Any, list[Any]]:
    """Return features, labels (None if there are none) and the hooks that the input needs.

    Raises:
        ConfigurationError: a list or tuple that is not of two, or a dataset that was made elsewhere.
    """
    hooks: list[Any] = []
    if isinstance(result, tf.data.Dataset):
        iterator = _iterator(result)
        hooks.append(_InitializeIterator(iterator.initializer))
        result = iterator.get_next()
    if isinstance(result, (list, tuple)):
        if len(result) != 2:
            raise ConfigurationError(
                f"input_fn must return (features, labels) or features alone; received {len(result)} values. "
                "Put several features into a dict."
            )
        return result[0], result[1], hooks
    return result, None, hooks


def warn_of_endless_input(features: Any) -> None:
    """Say that a prediction never ends when its features come from constant tensors."""
    tensors = [part for part in tf.nest.flatten(features) if isinstance(part, tf.Tensor)]
    from_dataset = any(tensor.op.type == "IteratorGetNext" for tensor in tensors)
    if not from_dataset and not tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.QUEUE_RUNNERS):
        tf.compat.v1.logging.warn("The input has no tf.data.Dataset and no queue: predict() will yield without end.")


def _iterator(dataset: Any) -> Any:
    try:
        return tf.compat.v1.data.make_initializable_iterator(dataset)
    except ValueError as error:
        raise ConfigurationError(
            f"The dataset that input_fn returned was made outside of input_fn ({dataset!r}). Make all of it inside: "
            "train, evaluate and predict each call input_fn in a graph of their own."
        ) from error


class _InitializeIterator(tf.compat.v1.train.SessionRunHook):
    """Start the iterator in each new session, also in one that replaces a lost one."""

    def __init__(self, initializer: Any) -> None:
        self._initializer = initializer

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._initializer)
