"""What an `input_fn` needs on several ranks: its part of the data, and random operations that are seeded alike."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdx import world
from hvdx.data.input_context import input_context
from hvdx.errors import ConfigurationError

v1 = tf.compat.v1


def asking_like(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for what stands in place of `function`: an Estimator gives it what its parameters ask for."""

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(call, function)
        # tf.estimator does not look behind a wrapper, but it believes this
        call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return call

    return decorate


def shard_input_fn(input_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return an input_fn that gives this rank its part: every size-th element of the dataset, as it comes.

    Of a dataset of batches it is every size-th batch. The elements must come in the same order on all ranks; inside
    `train_and_evaluate`, where random operations of the input are seeded alike on all ranks, they do. Better is an
    `input_fn(input_context)` that shards what it reads before it shuffles.

    Args:
        input_fn: returns a tf.data.Dataset.

    Raises:
        ConfigurationError: it returns something else, when it is called.
    """

    @asking_like(input_fn)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        dataset = input_fn(*args, **kwargs)
        if not isinstance(dataset, tf.data.Dataset | v1.data.Dataset):
            raise ConfigurationError(
                "shard_input_fn, and an evaluation that is sharded, take an input_fn that returns a tf.data.Dataset; "
                "tensors cannot be divided between the ranks. Return a dataset, or take an input_context and read this "
                f"rank's part. Received: {type(dataset).__name__} from {getattr(input_fn, '__name__', input_fn)!r}."
            )
        return dataset.shard(world.size(), world.rank())

    return sharded


def takes_context(input_fn: Callable[..., Any]) -> bool:
    """Return whether an input_fn asks for an InputContext."""
    return "input_context" in inspect.signature(input_fn).parameters


def with_context(input_fn: Callable[..., Any], *, whole: bool = False) -> Callable[..., Any]:
    """Return an input_fn to which an InputContext is given already, if it asks for one.

    Args:
        input_fn: the user's.
        whole: give it the context of a single pipeline, which reads all the data, instead of this rank's.
    """
    if not takes_context(input_fn):
        return input_fn
    return _fixed(input_fn, input_context=tf.distribute.InputContext() if whole else input_context())


def _fixed(input_fn: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """Return the function without the fixed parameters: the Estimator looks at the names that are left."""
    signature = inspect.signature(input_fn)

    @asking_like(input_fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return input_fn(*args, **fixed, **kwargs)

    left = [p for name, p in signature.parameters.items() if name not in fixed]
    call.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    return call


def seeded_alike(input_fn: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """Return an input_fn whose random operations are seeded with `seed`, whatever the graph's own seed is."""

    @asking_like(input_fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        graph = v1.get_default_graph()
        before, graph.seed = graph.seed, seed
        try:
            return input_fn(*args, **kwargs)
        finally:
            graph.seed = before

    return call
