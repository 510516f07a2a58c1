"""What a peer gives to the rank that measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.workloads import Shapes


@dataclass(frozen=True)
class Way:
    """One thing to measure: a call, and what its result must be.

    Args:
        run: does all the work and returns when it is done.
        means: turns a result into the arrays that must be the means over the ranks; None where there are none.
        fingerprint: what must be equal on all ranks after the call, such as trained weights; None where nothing is.
    """

    run: Callable[[], Any]
    means: Callable[[Any], list[np.ndarray]] | None = None
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

    So every rank knows the mean without asking anybody.
    """
    return base(index, shape) * np.float32(rank + 1)


def base(index: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return rank 0's gradient, repeated from a short block: hundreds of millions of random numbers take seconds."""
    block = np.random.default_rng(index).standard_normal(4099).astype(np.float32)
    return np.resize(block, shape)


def check_means(name: str, results: list[np.ndarray], shapes: Shapes, size: int) -> None:
    """See that a way has computed the means.

    Raises:
        AssertionError: it has not; says which tensor differs.
    """
    assert len(results) == len(shapes), f"{name} returned {len(results)} tensors for {len(shapes)}"
    for index, (result, shape) in enumerate(zip(results, shapes, strict=True)):
        wanted = base(index, shape) * np.float32((size + 1) / 2)
        np.testing.assert_allclose(
            np.asarray(result).reshape(shape), wanted, rtol=1e-4, atol=1e-5, err_msg=f"{name}, tensor {index}"
        )
