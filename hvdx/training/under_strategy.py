"""What an optimizer and a `tf.distribute` strategy of hvdx know of each other, so that gradients are reduced once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from hvdx.comm.reduce_op import ReduceOp

MARK = "hvdx_strategy"
"""The attribute by which a strategy says that hvdx reduces its gradients."""
_GLOBAL = "hvdx_global"
"""The attribute of gradients that a tape has reduced in a replica, and of the context of a replica in which it has."""
_state = threading.local()


def is_of_hvdx(strategy: Any) -> bool:
    """Return whether hvdx reduces the gradients under this strategy."""
    return bool(getattr(strategy, MARK, False))


def current() -> Any:
    """Return the strategy of hvdx in whose `run` this is, or None."""
    context = tf.distribute.get_replica_context()
    return context.strategy if context is not None and is_of_hvdx(context.strategy) else None


def reduces_by_itself() -> bool:
    """Return whether this is a replica of a strategy that reduces the gradients where an optimizer's `apply` begins.

    It does so over several devices too, of which hvdx's hooks in an optimizer know nothing: they leave it to it.
    """
    return bool(getattr(current(), "hvdx_reduces", False))


def op_of_gradients(op: ReduceOp) -> ReduceOp:
    """Return how gradients are reduced here: under a strategy losses are divided by the number of replicas before."""
    return ReduceOp.SUM if op is ReduceOp.AVERAGE and current() is not None else op


def mark_global(gradients: Iterable[Any]) -> None:
    """Mark gradients that a tape has reduced, so that an update in this replica need not exchange them again.

    What is computed from them has no mark, and is exchanged: replicas may have computed different things.
    """
    if current() is None:
        return
    for one in (tf.distribute.get_replica_context(), *gradients):
        if one is not None:
            setattr(one, _GLOBAL, True)


def given_global(gradients: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """Note, for the update inside the block, whether a tape has reduced all gradients that it was given."""
    marked = [hasattr(gradient, _GLOBAL) for gradient in gradients if gradient is not None]
    return _noted("global") if marked and all(marked) else contextlib.nullcontext()


def are_global() -> bool:
    """Return whether a tape has reduced the gradients of the update that this thread makes."""
    return bool(getattr(_state, "global", False))


def may_be_equal() -> bool:
    """Return whether a tape has reduced in this replica: gradients are equal on all then, whatever they have read."""
    return hasattr(tf.distribute.get_replica_context(), _GLOBAL)


def gradients_in_hand() -> contextlib.AbstractContextManager[None]:
    """Keep the strategy from reducing inside the block: hvdx's hook of the optimizer does it, or has."""
    return _noted("in_hand")


def are_in_hand() -> bool:
    """Return whether a hook of hvdx reduces the gradients of the update that this thread makes."""
    return bool(getattr(_state, "in_hand", False))


def starting_equal() -> contextlib.AbstractContextManager[None]:
    """Note that the variables created inside the block, in a v1 graph, will be given rank 0's values by a hook."""
    return _noted("equal")


def start_equal() -> bool:
    """Return whether a hook gives variables rank 0's values."""
    return bool(getattr(_state, "equal", False))


def building() -> contextlib.AbstractContextManager[None]:
    """Note that Keras builds a model from one batch inside the block."""
    return _noted("building")


def is_building() -> bool:
    """Return whether Keras builds a model in this thread."""
    return bool(getattr(_state, "building", False))


def alone() -> contextlib.AbstractContextManager[None]:
    """Let this rank create variables inside the block that the others do not: none of them is broadcast."""
    return _noted("alone")


def is_alone() -> bool:
    """Return whether this thread creates variables that other ranks do not."""
    return bool(getattr(_state, "alone", False))


@contextlib.contextmanager
def _noted(name: str) -> Iterator[None]:
    before = getattr(_state, name, False)
    setattr(_state, name, True)
    try:
        yield
    finally:
        setattr(_state, name, before)
