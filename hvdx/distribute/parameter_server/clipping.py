"""Clipping by norms that no server knows alone: from the servers' squared norms to one factor for each piece. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdx.distribute.parameter_server.placement import Placement


@dataclass(frozen=True)
class Clip:
    """What the workers and servers clip together, where the optimizer on a server cannot do it alone.

    Args:
        kind: "global" for a norm over all gradients, "each" for one norm a variable.
        limit: the largest norm.
    """

    kind: str
    limit: float


def shared_clip(clipnorm: float | None, global_clipnorm: float | None, placement: Placement) -> Clip | None:
    """Return what must be clipped together, or None where each server's optimizer clips by itself."""
    if clipnorm and clipnorm > 0:
        return Clip("each", clipnorm) if placement.cut else None
    if global_clipnorm and global_clipnorm > 0:
        return Clip("global", global_clipnorm) if placement.servers > 1 else None
    return None


def factors(clip: Clip, placement: Placement, norms: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Return, for each server, the factor of each of its pieces.

    Every worker computes the same from the same numbers, so whoever tells a server first tells it right.

    Args:
        clip: what is clipped.
        placement: where the pieces are.
        norms: for each server the squared norm of each piece's gradient; None where there is none.
    """
    pieces = [placement.of_server(server) for server in range(placement.servers)]
    totals: dict[int, float] = {}
    for own, squares in zip(pieces, norms, strict=True):
        for piece, square in zip(own, squares, strict=True):
            if square is not None:
                totals[piece.entry] = totals.get(piece.entry, 0.0) + square
    if clip.kind == "global":
        scale = _global_factor(math.sqrt(sum(totals[entry] for entry in sorted(totals))), clip.limit)
        return [[scale] * len(own) for own in pieces]
    scales = {entry: clip.limit / max(math.sqrt(square), clip.limit) for entry, square in totals.items()}
    return [[scales.get(piece.entry, 1.0) for piece in own] for own in pieces]


def _global_factor(norm: float, limit: float) -> float:
    """Return the factor of `tf.clip_by_global_norm`: not a number where the norm is not finite."""
    if not math.isfinite(norm):
        return math.nan
    return 1.0 if norm <= limit else limit / norm
