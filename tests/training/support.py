"""What the training tests share: the families of optimizers, the data of a step, and comparing over all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import world as world_module
from tests.conftest import installed_kerases, load_keras


@dataclass(frozen=True)
class Family:
    """One Keras and one of its two sets of optimizers (`legacy` is the second of tf_keras and Keras 2)."""

    keras_name: str
    legacy: bool = False

    @property
    def keras(self) -> Any:
        """The module of this Keras."""
        return load_keras(self.keras_name)

    @property
    def optimizers(self) -> Any:
        """The module with the optimizer classes."""
        optimizers = self.keras.optimizers
        return optimizers.legacy if self.legacy else optimizers

    @property
    def loss_scale(self) -> Any:
        """The LossScaleOptimizer class of this Keras."""
        if self.keras_name == "keras3":
            return self.keras.optimizers.LossScaleOptimizer
        return self.keras.mixed_precision.LossScaleOptimizer

    def __str__(self) -> str:
        return self.keras_name + ("-legacy" if self.legacy else "")


FAMILIES = [Family(name) for name in installed_kerases()]
LEGACY = [Family(name, legacy=True) for name in installed_kerases() if name != "keras3"]
KERAS_3 = [family for family in FAMILIES if family.keras_name == "keras3"]

every_keras = pytest.mark.parametrize("family", FAMILIES, ids=str)
every_family = pytest.mark.parametrize("family", FAMILIES + LEGACY, ids=str)


def part(steps: Any, rank: int) -> Any:
    """Return what one rank trains on, from arrays [steps, ranks, batch, ...] in any structure."""
    return tf.nest.map_structure(lambda a: a[:, rank].reshape(-1, *a.shape[3:]), steps)


def union(steps: Any) -> Any:
    """Return what one process would train on: each of its batches is the union of all ranks' batches of that step."""
    return tf.nest.map_structure(lambda a: a.reshape(-1, *a.shape[3:]), steps)


def together(function: Callable[[], Any]) -> Any:
    """Run a function on every rank and raise on all of them if it failed on one, so that ranks stay in step."""
    value, text = None, ""
    try:
        value = function()
    except Exception:
        text = traceback.format_exc()
    texts = gathered(text)
    failed = [f"rank {rank}:\n{text}" for rank, text in enumerate(texts) if text]
    assert not failed, "\n".join(failed)
    return value


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, also while a rank that failed is a few collectives ahead of or behind the others."""
    for _ in range(8):
        with contextlib.suppress(hvd.MismatchError, hvd.GradientError):
            return list(hvd.allgather_object(value))
    return list(hvd.allgather_object(value))


def raised_everywhere(types: Any, function: Callable[[], Any]) -> list[str]:
    """Return every rank's message of the error that `function` must raise on all ranks."""
    outcome = "nothing was raised"
    try:
        function()
    except types as error:
        outcome = "raised " + str(error)
    except Exception:
        outcome = traceback.format_exc()
    outcomes = gathered(outcome)
    assert all(outcome.startswith("raised ") for outcome in outcomes), "\n".join(outcomes)
    return [outcome.removeprefix("raised ") for outcome in outcomes]


def arrays(variables: Sequence[Any]) -> list[np.ndarray]:
    """Return the values of variables of TensorFlow or any Keras."""
    return [np.asarray(variable.numpy() if hasattr(variable, "numpy") else variable) for variable in variables]


def optimizer_arrays(optimizer: Any) -> list[np.ndarray]:
    """Return an optimizer's state: slots, iterations, what else it keeps in variables, state of loss scaling."""
    variables = optimizer.variables
    found = list(variables() if callable(variables) else variables)
    scale = getattr(optimizer, "_loss_scale", None)  # of tf_keras and Keras 2; Keras 3 has it among the variables
    found += [getattr(scale, name) for name in ("current_loss_scale", "counter") if hasattr(scale, name)]
    return arrays(found)


def assert_same_bits(values: Sequence[np.ndarray], what: str) -> None:
    """Check that all ranks hold the same arrays to the last bit; collective."""
    digests = gathered([hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest() for value in values])
    assert all(digest == digests[0] for digest in digests), f"{what} differ between the ranks: {digests}"


def assert_equal_everywhere(
    values: Sequence[np.ndarray], references: Sequence[np.ndarray], rtol: float, atol: float, what: str = "weights"
) -> None:
    """Check on all ranks that arrays are equal to their references within a tolerance; collective."""

    def compare() -> None:
        assert len(values) == len(references)
        for index, (value, reference) in enumerate(zip(values, references, strict=True)):
            np.testing.assert_allclose(
                value.astype("float64"), reference.astype("float64"), rtol, atol, err_msg=f"{what}[{index}]"
            )

    together(compare)


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """Count the collectives that run inside the block; the number is in the list afterwards."""
    agreement = getattr(world_module.communicator(), "_agreement", None)
    result: list[int] = []
    before = agreement.sequence if agreement is not None else 0
    yield result
    result.append(agreement.sequence - before if agreement is not None else 0)


@contextlib.contextmanager
def policy(keras: Any, name: str | None) -> Iterator[None]:
    """Set the global dtype policy inside the block."""
    if name is None:
        yield
        return
    keras.mixed_precision.set_global_policy(name)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy("float32")
