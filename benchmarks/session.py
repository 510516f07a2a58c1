"""What a peer gives to the rank that measures it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.workloads import Shapes

PERIOD = 4099
PERIODS = 64
"""Periods of a gradient that are looked at together."""


@dataclass(frozen=True)
class Way:
    """One thing to measure: a call, and what its result must be.

    Args:
        run: does all the work and returns when it is done.
        means: turns a result into the arrays that must be the means over the ranks; None where there are none.
        fingerprint: what must be equal on all ranks after the call, such as trained weights; None where nothing is.
    """

    run: Callable[[], Any]
    means: Callable[[Any], Iterable[np.ndarray]] | None = None
    fingerprint: Callable[[], str] | None = None


@dataclass(frozen=True)
class Session:
    """A rank that has joined the others.

    Args:
        rank, size: this rank, and how many there are.
        ways: makes the ways to reduce tensors of these shapes (or to train for as many steps), by their names.
        close: leaves; collective.
        versions: what else the numbers depend on, such as the MPI library.
    """

    rank: int
    size: int
    ways: Callable[[Shapes], dict[str, Way]]
    close: Callable[[], None] = lambda: None
    versions: dict[str, str] = field(default_factory=dict)


def gradient(index: int, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Return a rank's gradient: numbers of normal size that are rank + 1 times those of rank 0.

    So every rank knows the mean without asking anybody. They repeat after PERIOD: hundreds of millions of random
    numbers take seconds.
    """
    return np.resize(_period(index) * np.float32(rank + 1), shape)


def _period(index: int) -> np.ndarray:
    return np.random.default_rng(index).standard_normal(PERIOD).astype(np.float32)


def check_means(name: str, results: Iterable[np.ndarray], shapes: Shapes, size: int) -> None:
    """See that a way has computed the means.

    Raises:
        AssertionError: it has not; says which tensor differs.
    """
    count = 0
    for index, result in enumerate(results):
        flat = np.asarray(result).reshape(-1)
        wanted = np.resize(_period(index) * np.float32((size + 1) / 2), PERIODS * PERIOD)
        # Piece by piece: some tensors have 100 million numbers, and all ranks of a job do this at the same time.
        for begin in range(0, flat.size, wanted.size):
            piece = flat[begin : begin + wanted.size]
            np.testing.assert_allclose(
                piece, wanted[: piece.size], rtol=1e-4, atol=1e-5, err_msg=f"{name}, tensor {index}, from {begin} on"
            )
        count += flat.size
    total = sum(math.prod(shape) for shape in shapes)
    assert count == total, f"{name} returned {count} numbers for {total}"
