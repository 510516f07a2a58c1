"""Every optimizer class of every Keras makes the updates of one process that applies the mean gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from tests.training.support import (
    FAMILIES,
    LEGACY,
    Family,
    arrays,
    assert_equal_everywhere,
    assert_same_bits,
    every_family,
    optimizer_arrays,
    together,
)

pytestmark = pytest.mark.np(2)

STEPS = 3


def _classes(family: Family) -> list[str]:
    optimizers = family.optimizers
    return sorted(
        name
        for name, cls in vars(optimizers).items()
        if isinstance(cls, type)
        and issubclass(cls, optimizers.Optimizer)
        and cls is not optimizers.Optimizer
        and name != "LossScaleOptimizer"
    )


def _makers(family: Family) -> dict[str, Any]:
    """The classes that take more than a learning rate."""

    def multi(rate: float) -> Any:
        chosen = family.optimizers.OptimizerMap(family.optimizers.SGD(rate, clipnorm=0.5))
        chosen[".*bias.*"] = family.optimizers.Adam(rate)
        return family.optimizers.MultiOptimizer(chosen)

    return {"MultiOptimizer": multi}


CASES = [(family, name) for family in FAMILIES + LEGACY for name in _classes(family)]


@pytest.mark.parametrize(("family", "name"), CASES, ids=[f"{family}-{name}" for family, name in CASES])
def test_updates_are_those_of_the_mean_gradients(world: Any, family: Family, name: str) -> None:
    make = _makers(family).get(name) or getattr(family.optimizers, name)
    gradients = _gradients(world.size())
    reference = _updated(family, make(0.1), gradients.mean(1, dtype="float32"))
    result = together(lambda: _updated(family, hvd.DistributedOptimizer(make(0.1)), gradients[:, world.rank()]))
    assert_same_bits(result, "variables and slots")
    # A mean over 2 ranks has no rounding of its own, so whatever the optimizer computes, it computes on the same bits.
    tolerance = 0.0 if world.size() <= 2 else 1e-5
    assert_equal_everywhere(result, reference, tolerance, tolerance, "variables and slots")


def test_the_list_has_what_is_known() -> None:
    """The classes are looked up, so that new ones are tested too; an empty list would test nothing."""
    for family in FAMILIES + LEGACY:
        assert {"Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "RMSprop", "SGD"} <= set(_classes(family))


@every_family
def test_huge_opposite_gradients_are_clipped_after_they_are_averaged(world: Any, family: Family) -> None:
    """Clipped before, the ranks' gradients would cancel; averaged before, what remains of them is clipped to 1."""
    sign = 0.0 if world.size() == 1 else float(world.size() - 1 if world.rank() == 0 else -1)
    own = np.full((4, 3), 2.0**20 * sign, "float32") + np.arange(12, dtype="float32").reshape(4, 3)
    variable = tf.Variable(tf.zeros((4, 3)))
    optimizer = hvd.DistributedOptimizer(family.optimizers.SGD(1.0, global_clipnorm=1.0))
    together(lambda: optimizer.apply_gradients([(tf.constant(own), variable)]))
    mean = np.arange(12, dtype="float32").reshape(4, 3)
    assert_equal_everywhere([variable.numpy()], [-mean / np.linalg.norm(mean)], 1e-6, 1e-7)


def _gradients(ranks: int) -> np.ndarray:
    """Return gradients of a kernel and a bias, [steps, ranks, 5, 3]; row 4 is the bias."""
    return np.random.default_rng(3).normal(size=(STEPS, ranks, 5, 3)).astype("float32")


def _updated(family: Family, optimizer: Any, gradients: np.ndarray) -> list[np.ndarray]:
    make = family.keras.Variable if family.keras_name == "keras3" else tf.Variable
    variables = [make(np.ones((4, 3), "float32"), name="kernel"), make(np.ones(3, "float32"), name="bias")]
    for step in gradients:
        optimizer.apply_gradients(list(zip([tf.constant(step[:4]), tf.constant(step[4])], variables, strict=True)))
    return arrays(variables) + optimizer_arrays(optimizer)
