"""What the peers that run in a tf.function share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.session import gradient
from benchmarks.workloads import Shapes

ALIGNMENT = 64
"""Bytes; where TensorFlow puts its own tensors."""


def captured(shapes: Shapes, rank: int) -> Callable[[], list[Any]]:
    """Return a function that makes a rank's gradients inside a tf.function.

    The function captures them: in a training step they arise inside, and arguments cost time of their own. They use
    numpy's memory, since `tf.constant` takes twice as much and TensorFlow never gives that back.
    """
    import tensorflow as tf

    arrays_of_rank = (_aligned(gradient(index, shape, rank)) for index, shape in enumerate(shapes))
    held = [tf.experimental.dlpack.from_dlpack(array.__dlpack__()) for array in arrays_of_rank]

    def inside() -> list[Any]:
        return [tf.identity(tensor) for tensor in held]  # tensors of the graph; nothing is copied

    return inside


def _aligned(array: np.ndarray) -> np.ndarray:
    """Return the numbers at a multiple of ALIGNMENT bytes."""
    spare = ALIGNMENT // array.itemsize
    room = np.empty(array.size + spare, array.dtype)
    first = (-room.ctypes.data % ALIGNMENT) // array.itemsize
    placed = room[first : first + array.size].reshape(array.shape)
    placed[...] = array
    return placed


def arrays(result: Any) -> Iterator[np.ndarray]:
    """Yield the tensors that a tf.function has returned as arrays, which are copies."""
    return (tensor.numpy() for tensor in result)


def mpi_version() -> dict[str, str]:
    """Return the name and version of the MPI library that mpi4py has loaded."""
    from mpi4py import MPI

    first = MPI.Get_library_version().strip().splitlines()[0].split(",")[0]
    return {"MPI in use:": " ".join(first.replace("\0", "").split())}
