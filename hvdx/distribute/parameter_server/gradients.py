"""Gradients cut into what each server keeps of them, and parameters put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdx.distribute.parameter_server.placement import Placement
from hvdx.distribute.parameter_server.protocol import dtype_of
from hvdx.distribute.parameter_server.reduction import Gradient, Rows, rows
from hvdx.errors import GradientError

Part = tuple[list[str | None] | None, list[np.ndarray]]


def as_gradients(placement: Placement, gradients: Sequence[Any]) -> list[Gradient | None]:
    """Return arrays, tensors and IndexedSlices as arrays and rows, in the dtypes of the variables.

    Raises:
        GradientError: their number or a shape does not fit; names the variable.
    """
    entries = placement.entries
    if len(gradients) != len(entries):
        raise GradientError(f"{len(entries)} variables are registered. Received: {len(gradients)} gradients.")
    result: list[Gradient | None] = []
    for gradient, entry in zip(gradients, entries, strict=True):
        if gradient is None:
            result.append(None)
            continue
        dtype = dtype_of(entry.dtype)
        sparse = hasattr(gradient, "indices")
        values = np.asarray(gradient.values if sparse else gradient).astype(dtype, copy=False)
        found = (entry.shape[0], *values.shape[1:]) if sparse and values.ndim else values.shape
        if tuple(found) != entry.shape:
            raise GradientError(
                f"The gradient of {entry.key} has the shape {tuple(values.shape)}, and the variable {entry.shape}."
            )
        result.append(rows(np.asarray(gradient.indices).astype(np.int64), values) if sparse else values)
    return result


def cut(placement: Placement, gradients: Sequence[Gradient | None] | None) -> list[Part]:
    """Return for each server of what kind its pieces' gradients are, and the arrays; nothing where there are none."""
    parts: list[Part] = []
    for server in range(placement.servers):
        kinds: list[str | None] = []
        arrays: list[np.ndarray] = []
        for piece in placement.of_server(server) if gradients is not None else ():
            gradient = gradients[piece.entry]  # type: ignore[index]
            if gradient is None:
                kinds.append(None)
            elif isinstance(gradient, Rows):
                kinds.append("rows")
                own = gradient if piece.whole else gradient.between(piece.start, piece.stop)
                arrays += [own.indices, own.values]
            else:
                kinds.append("dense")
                arrays.append(piece.of(gradient))
        parts.append((kinds, arrays))
    return parts


def assembled(
    placement: Placement, values: Sequence[Sequence[np.ndarray]], rows: Mapping[int, np.ndarray]
) -> list[np.ndarray]:
    """Return the variables put together.

    Args:
        placement: where the pieces are.
        values: of each server, its pieces.
        rows: of which variables only some rows have come, and which.
    """
    result: list[Any] = [None] * len(placement.entries)
    for server, arrays in enumerate(values):
        for piece, array in zip(placement.of_server(server), arrays, strict=True):
            entry = placement.entries[piece.entry]
            asked = rows.get(piece.entry)
            if asked is None and piece.whole:
                result[piece.entry] = array
                continue
            if result[piece.entry] is None:
                shape = entry.shape if asked is None else (len(asked), *entry.shape[1:])
                result[piece.entry] = np.empty(shape, array.dtype)
            place = slice(piece.start, piece.stop) if asked is None else (asked >= piece.start) & (asked < piece.stop)
            result[piece.entry][place] = array
    return result
