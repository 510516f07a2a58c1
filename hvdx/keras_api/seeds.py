"""Seeds that differ between ranks, so that not every rank drops the same units."""

from __future__ import annotations

_STRIDE = 0x9E3779B1
"""Odd, so that its multiples modulo a power of two are all different; 2**32 divided by the golden ratio."""


def seed_of_rank(seed: int, distance: int) -> int:
    """Return a seed for the rank that is `distance` from the root; the root (0) keeps its own.

    Args:
        seed: the root's seed, which may be negative.
        distance: a number of ranks.
    """
    return seed if distance == 0 else (seed + distance * _STRIDE) % (1 << 31)


def index_of_seed(name: str) -> int | None:
    """Return which number of a variable of this name is a seed, or None where none is."""
    if "seed_generator_state" in name:  # Keras 3
        return 0
    return -1 if name.startswith("StateVar") else None  # tf.random.Generator
