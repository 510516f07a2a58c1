"""Broadcast: every rank gets the root rank's tensor, or its variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx import world
from hvdx.comm.communicator import Label
from hvdx.comm.dtypes import numpy_dtype
from hvdx.comm.order import together
from hvdx.comm.reduce_op import ReduceOp, is_numeric
from hvdx.errors import ConfigurationError
from hvdx.logs import log
from hvdx.ops.convert import to_tensor
from hvdx.ops.xla import refuse_inside_xla


def broadcast(tensor: Any, root_rank: int = 0, *, name: str | None = None) -> Any:
    """Return the tensor of rank `root_rank` on every rank; collective, differentiable.

    Args:
        tensor: numbers or bool, of the same shape and dtype on every rank.
        root_rank: whose tensor it is.
        name: what to call the tensor in messages.

    Raises:
        ConfigurationError: `root_rank` is no rank of this world.
        MismatchError, StallError, UnsupportedError: as `allreduce`.

    The gradient at the root is the sum of all ranks' gradients; elsewhere it is zero. Source: MPI 4.1 standard,
    section 6.4 (MPI_Bcast).
    """
    refuse_inside_xla()
    value = to_tensor(tensor)
    numpy_dtype(value)
    label = Label("tensor(s)", (name or "tensor_0",))
    communicator = world.communicator()
    communicator.check_root(root_rank)

    @tf.custom_gradient
    def forward(own: Any) -> Any:
        [result] = communicator.broadcast([own], root_rank, label)

        def backward(upstream: Any) -> Any:
            about = Label("gradients of a broadcast", label.names)
            [total] = communicator.grouped_allreduce([upstream], ReduceOp.SUM, about, 0)
            return total if communicator.topology.rank == root_rank else tf.zeros_like(total)

        return result, backward

    return forward(value)


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> Any:
    """Overwrite the variables with those of rank `root_rank`; collective, eager or in a graph.

    Args:
        variables: tf.Variables, variables of any Keras, or a mix, in the same order on every rank. Variables that hold
            no numbers (strings, resources) are left alone, and a line says so.
        root_rank: whose values they get.

    Returns:
        In a graph the operation that does it, which a `tf.function` runs by itself and a v1 session must be asked for.

    Raises:
        ConfigurationError: `root_rank` is no rank of this world.
        MismatchError: the variables differ in number, shape or dtype.
    """
    communicator = world.communicator()
    communicator.check_root(root_rank)
    numeric: list[Any] = []
    skipped: list[Any] = []
    refuse_inside_xla()
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise ConfigurationError(
                f"broadcast_variables takes variables of TensorFlow or Keras. Received: {variable!r}."
            )
        (numeric if _is_numeric(variable) else skipped).append(variable)
    if skipped:
        names = ", ".join(variable_name(variable) for variable in skipped)
        log.warning("broadcast_variables left %d variable(s) alone that hold no numbers: %s", len(skipped), names)
    if not numeric:
        return None if tf.executing_eagerly() else tf.no_op()
    label = Label("variables", tuple(variable_name(variable) for variable in numeric))
    with together():  # in a v1 graph tied to nothing else: it is run once, by itself
        values = communicator.broadcast([to_tensor(variable) for variable in numeric], root_rank, label)
    if tf.executing_eagerly():
        if communicator.topology.rank != root_rank:
            for variable, value in zip(numeric, values, strict=True):
                variable.assign(value)
        return None
    # The root assigns too: TensorFlow leaves out operations of a library that nobody uses the result of.
    assigned = [variable.assign(value) for variable, value in zip(numeric, values, strict=True)]
    return tf.group([getattr(result, "op", result) for result in assigned])


def variable_name(variable: Any) -> str:
    """Return the name a user knows a variable by: its path in Keras 3, its name elsewhere."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "variable")


def _is_numeric(variable: Any) -> bool:
    try:
        return is_numeric(np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype))
    except TypeError:
        return False
