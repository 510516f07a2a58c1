"""All-gather: every rank gets the concatenation of all ranks' tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdx import world
from hvdx.comm.communicator import Label
from hvdx.comm.dtypes import numpy_dtype
from hvdx.comm.order import together
from hvdx.comm.reduce_op import ReduceOp
from hvdx.ops.convert import to_tensor
from hvdx.ops.xla import refuse_inside_xla


def allgather(tensor: Any, *, name: str | None = None) -> Any:
    """Concatenate the ranks' tensors on dimension 0, in the order of ranks; collective, differentiable.

    Args:
        tensor: numbers or bool. Dimension 0 may differ between ranks, and may be 0; the others must agree. A scalar
            counts as one row.
        name: what to call the tensor in messages.

    Returns:
        A tensor of shape [sum of the ranks' first dimensions, ...].

    Raises:
        MismatchError, StallError, UnsupportedError: as `allreduce`.

    The gradient of a rank's own input is the sum over all ranks of the gradients of its rows. Source: MPI 4.1
    standard, section 6.7 (MPI_Allgatherv).
    """
    refuse_inside_xla()
    value = to_tensor(tensor)
    if value.shape.rank == 0:
        value = value[tf.newaxis]
    numpy_dtype(value)
    label = Label("tensor(s)", (name or "tensor_0",))
    communicator = world.communicator()

    @tf.custom_gradient
    def forward(own: Any) -> Any:
        gathered = communicator.allgather(own, label)

        def backward(upstream: Any) -> Any:
            about = Label("gradients of an allgather", label.names)
            with together([upstream, own]):
                [total] = communicator.grouped_allreduce([upstream], ReduceOp.SUM, about, 0)
                rows = communicator.allgather(tf.shape(own, tf.int64)[:1], Label("row counts", label.names))
            start = tf.reduce_sum(rows[: communicator.topology.rank])
            return total[start : start + rows[communicator.topology.rank]]

        return gathered, backward

    return forward(value)
