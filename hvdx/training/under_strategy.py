"""What an optimizer and a `tf.distribute` strategy of hvdx know of each other, so that gradients are reduced once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvdx.comm.reduce_op import ReduceOp

MARK = "hvdx_strategy"
"""The attribute by which a strategy says that hvdx reduces its gradients."""
_state = threading.local()


def is_of_hvdx(strategy: Any) -> bool:
    """Return whether hvdx reduces the gradients under this strategy."""
    return bool(getattr(strategy, MARK, False))


def current() -> Any:
    """Return the strategy of hvdx in whose `run` this is, or None."""
    context = tf.distribute.get_replica_context()
    return context.strategy if context is not None and is_of_hvdx(context.strategy) else None


def op_of_gradients(op: ReduceOp) -> ReduceOp:
    """Return how gradients are reduced here: under a strategy losses are divided by the number of replicas before."""
    return ReduceOp.SUM if op is ReduceOp.AVERAGE and current() is not None else op


@contextlib.contextmanager
def gradients_in_hand() -> Iterator[None]:
    """Keep the strategy from reducing inside the block: hvdx's hook of the optimizer does it, or has."""
    before = are_in_hand()
    _state.in_hand = True
    try:
        yield
    finally:
        _state.in_hand = before


def are_in_hand() -> bool:
    """Return whether a hook of hvdx reduces the gradients of the update that this thread makes."""
    return bool(getattr(_state, "in_hand", False))


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Note that Keras builds a model from one batch inside the block."""
    _state.building = True
    try:
        yield
    finally:
        _state.building = False


def is_building() -> bool:
    """Return whether Keras builds a model in this thread."""
    return bool(getattr(_state, "building", False))
