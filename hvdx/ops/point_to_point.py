"""Sending a tensor from one rank to another."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdx import world
from hvdx.comm.dtypes import numpy_dtype
from hvdx.errors import ConfigurationError
from hvdx.ops.convert import to_tensor
from hvdx.ops.xla import refuse_inside_xla

_LARGEST_TAG = 32767


def send(tensor: Any, destination: int, tag: int = 0) -> Any:
    """Send a tensor to one rank, which must call `recv`; not collective, not differentiable.

    Args:
        tensor: numbers or bool, any shape.
        destination: the rank that receives.
        tag: 0 to 32767; a message is received only by a `recv` with the same tag. Messages with one tag between two
            ranks keep their order.

    Returns:
        None where TensorFlow is eager, else the operation that sends.

    Raises:
        ConfigurationError: destination or tag out of range.
        StallError: nobody received it within HVDX_TIMEOUT seconds. (A small tensor counts as sent when MPI has taken a
            copy of it.)
        UnsupportedError: the communicator has no point-to-point messages (horovod, tensorflow); or the tensor has more
            than 14 dimensions.
    """
    refuse_inside_xla()
    value = to_tensor(tensor)
    numpy_dtype(value)
    return world.communicator().send(value, destination, _check_tag(tag))


def recv(like: Any, source: int, tag: int = 0) -> Any:
    """Receive the tensor that rank `source` sends with `tag`; not collective, not differentiable.

    Args:
        like: a `tf.TensorSpec` (dimensions may be None) or a tensor that has the dtype and shape to expect.
        source: the rank that sends.
        tag: as in `send`.

    Raises:
        ConfigurationError: source or tag out of range.
        MismatchError: a tensor of another dtype or shape came; the message names both.
        StallError: nothing came within HVDX_TIMEOUT seconds.
        UnsupportedError: the communicator has no point-to-point messages (horovod, tensorflow).
    """
    refuse_inside_xla()
    spec = like if isinstance(like, tf.TensorSpec) else to_tensor(like)
    numpy_dtype(spec)
    return world.communicator().recv(spec.dtype, spec.shape, source, _check_tag(tag))


def _check_tag(tag: int) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag <= _LARGEST_TAG:
        raise ConfigurationError(f"A tag is an integer from 0 to {_LARGEST_TAG}. Received: {tag!r}.")
    return tag
