"""Which dtypes travel, and how they are named, seen from TensorFlow and from numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdx.comm.reduce_op import is_numeric
from hvdx.errors import UnsupportedError


def numpy_dtype(tensor: Any) -> np.dtype:
    """Return the numpy dtype of a TensorFlow tensor.

    Raises:
        UnsupportedError: the tensor holds no numbers (strings, resources, variants).
    """
    try:
        dtype = np.dtype(tensor.dtype.as_numpy_dtype)
    except TypeError:
        dtype = np.dtype(object)
    if not is_numeric(dtype):
        raise UnsupportedError(
            f"Only numbers and bool travel between ranks. Received: a tensor of dtype {tensor.dtype.name}. "
            "Use broadcast_object or allgather_object for anything else."
        )
    return dtype
