"""One operation of a graph that takes part in a collective, and the ticket that keeps such operations in order.

In a `tf.function` TensorFlow runs in the order of the program what touches the same resource, and what touches none.
A `tf.cond` or an inner function with variables and a collective inside touches those variables only, so nothing would
tie it to a collective before or after it. So each collective takes one more input: the handle of a variable that is
never read, the ticket, which all collectives of a process share.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.saved_model.save_context import in_save_context

from hvdx import keras_api
from hvdx.comm.order import placed

F = TypeVar("F", bound=Callable[..., Any])
_lock = threading.Lock()
_ticket: Any = None

# TensorFlow describes a handle to numpy in a way that numpy 1 has warned of; nobody looks at the array.
warnings.filterwarnings("ignore", r"Passing \(type, 1\) or '1type'", FutureWarning)


def as_written(function: F) -> F:
    """Keep AutoGraph from rewriting a function and what it defines and calls.

    It would rewrite those that run in each step as well, and each call in them would take some microseconds more.
    """
    kept: F = tf.autograph.experimental.do_not_convert(function)
    return kept


@as_written
def in_turn(function: Callable[..., Any], tensors: Sequence[Any], dtypes: Any) -> Any:
    """Return the results of an operation in a graph that runs `function` on the tensors' arrays, in its turn.

    Args:
        function: takes an array for each tensor, and returns one or a list, as `dtypes` says.
        tensors: what it works on.
        dtypes: of what it returns.
    """
    run = placed(function)
    ticket = _ticket_here()
    if ticket is None:
        return tf.numpy_function(run, tensors, dtypes, stateful=True)

    def without_ticket(*arrays: np.ndarray) -> Any:
        return run(*arrays[:-1])

    # What touches no resource (a print, an assertion, a function of the user's) keeps its place too: such an operation,
    # which does nothing, stands before and after this one.
    with tf.control_dependencies([_nothing()]):
        results = tf.numpy_function(without_ticket, [*tensors, ticket], dtypes, stateful=True)
    with tf.control_dependencies(tf.nest.flatten(results)):
        _nothing()
    return results


def _nothing() -> Any:
    """Return an operation that TensorFlow keeps in line with those that touch no resource, and then leaves out."""
    return tf.raw_ops.Assert(condition=True, data=[0])


def _ticket_here() -> Any:
    """Return the ticket's handle, or None where it cannot be used.

    A session's graph has another order (`order.py`), and a layer that is saved must not need what is not part of it.
    """
    global _ticket
    if not tf.compat.v1.executing_eagerly_outside_functions() or keras_api.is_saving() or in_save_context():
        return None
    with _lock:
        if _ticket is None:
            # not tf.Variable: a strategy's scope would make one for each of its replicas
            with tf.init_scope(), tf.device("CPU:0"):
                _ticket = ResourceVariable(np.int8(0), trainable=False, name="hvdx_ticket")
    return _ticket.handle
