"""Variables of which each device has a part: what changes one part, what all, and how they start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable

from hvdx import keras_api, world
from hvdx.distribute.between_ranks import broadcast_new
from hvdx.training.under_strategy import are_in_hand


def started(variable: Any, given: Any) -> Any:
    """Return a new variable of a mirrored strategy, of a class of hvdx's and with its first value; collective.

    Args:
        variable: the new one.
        given: what it was created with.
    """
    if type(variable) is SyncOnReadVariable:
        variable.__class__ = _Unread
    elif type(variable) is MirroredVariable:
        seed = keras_api.index_of_seed(str(given.get("name") or ""))
        variable.__class__ = _Variable if seed is None else _OwnVariable
        _start_equal(variable, seed, given)
    return variable


class _Variable(MirroredVariable):
    """A mirrored variable whose parts are changed one by one in an update that all replicas make alike."""

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        if are_in_hand():
            return update_fn(self._get_on_device_or_primary(), value, **kwargs)
        return super()._update_replica(update_fn, value, **kwargs)


class _OwnVariable(MirroredVariable):
    """The state of a source of random numbers, which each replica has of its own."""

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)


class _Unread(SyncOnReadVariable):
    """A variable that is reduced as it is read, and so is not read where it is assigned between the ranks.

    Else a rank that alone loads a file would wait for the others.
    """

    def assign(self, value: Any, use_locking: bool = False, name: Any = None, read_value: bool = True) -> Any:
        """As `tf.Variable.assign`; with several ranks it returns an operation outside of a replica."""
        in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        read_value = read_value and (in_replica or world.size() == 1)
        return super().assign(value, use_locking, name, read_value)


def _start_equal(variable: Any, seed: int | None, given: Any) -> None:
    """Give a new variable rank 0's value on all devices of all ranks; collective. A seed differs by rank and device.

    Args:
        variable: the new one.
        seed: which of its numbers is a seed, if one is.
        given: what it was created with.
    """
    if not tf.executing_eagerly() or variable.dtype in (tf.string, tf.resource):
        return
    first, *others = variable.values
    broadcast_new(first, given)
    if seed is None and world.size() == 1:
        return  # TensorFlow has copied it
    for number, other in enumerate(others, 1):
        value = first.numpy()
        if seed is not None:
            value[seed] = keras_api.seed_of_rank(int(value[seed]), number * world.size())
        other.assign(value)
