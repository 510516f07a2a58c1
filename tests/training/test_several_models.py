"""Two models with two optimizers in one step, as a generator and its critic: each reduces its own gradients."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from tests.training.models import BATCH, dense, linear_data
from tests.training.support import (
    FAMILIES,
    KERAS_3,
    Family,
    arrays,
    assert_equal_everywhere,
    assert_same_bits,
    counting,
    every_family,
    part,
    together,
    union,
)

pytestmark = pytest.mark.np(2)


@every_family
@pytest.mark.parametrize("reduced_by", ["optimizer", "tape"])
def test_two_models_and_two_optimizers(world: Any, family: Family, reduced_by: str) -> None:
    data = linear_data(world.size())
    reference, _ = _trained(family, union(data), BATCH * world.size(), "nothing")
    weights, collectives = together(lambda: _trained(family, part(data, world.rank()), BATCH, reduced_by))
    assert_same_bits(weights, "weights")
    assert_equal_everywhere(weights, reference, 1e-5, 1e-6)
    assert collectives == (0 if world.size() == 1 else 2 * 4)


def _trained(family: Family, data: Any, batch: int, reduced_by: str) -> tuple[list[Any], int]:
    family.keras.utils.set_random_seed(7)
    models = [dense(family.keras), dense(family.keras)]
    optimizers = [family.optimizers.SGD(0.1, momentum=0.9), family.optimizers.Adam(0.01, epsilon=1e-3)]
    if reduced_by == "optimizer":
        optimizers = [hvd.DistributedOptimizer(optimizer) for optimizer in optimizers]
    for model, optimizer in zip(models, optimizers, strict=True):
        if hasattr(optimizer, "build"):
            optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            outputs = [model(x) for model in models]
            losses = [
                tf.reduce_mean((outputs[0] - y) ** 2),
                tf.reduce_mean((outputs[1] - tf.stop_gradient(outputs[0]) * y) ** 2),
            ]
        for tape, model, optimizer, loss in zip((first, second), models, optimizers, losses, strict=True):
            own = hvd.DistributedGradientTape(tape) if reduced_by == "tape" else tape
            gradients = own.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    x, y = data
    with counting() as collectives:
        for start in range(0, len(x), batch):
            step(tf.constant(x[start : start + batch]), tf.constant(y[start : start + batch]))
    return [array for model in models for array in arrays(model.weights)], collectives[0]


@pytest.mark.parametrize("family", KERAS_3, ids=str)
def test_two_accumulating_optimizers_beside_a_collective(world: Any, family: Family) -> None:
    """Accumulation puts the reduction in a tf.cond with variables; what a rank is slow at must not change the order."""
    variables = [family.keras.Variable(np.zeros(3 + i, "float32")) for i in range(2)]
    optimizers = [hvd.DistributedOptimizer(family.optimizers.SGD(1.0), backward_passes_per_step=2) for _ in range(2)]
    for optimizer, variable in zip(optimizers, variables, strict=True):
        optimizer.build([variable])

    def slow(x: Any, where: int) -> Any:
        def wait(value: np.ndarray) -> np.ndarray:
            time.sleep(0.02 if world.rank() % 3 == where else 0)
            return value

        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32, stateful=False), [])

    @tf.function
    def step(x: Any) -> Any:
        for where, (optimizer, variable) in enumerate(zip(optimizers, variables, strict=True)):
            optimizer.apply([tf.ones(variable.shape) * slow(x, where)], [variable])
        return hvd.allreduce(slow(x, 2))

    def train() -> None:
        for _ in range(6):
            assert float(step(tf.constant(1.0 + world.rank()))) == (world.size() + 1) / 2
        for variable in variables:
            np.testing.assert_allclose(np.asarray(variable), -3 * (world.size() + 1) / 2)

    together(train)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in KERAS_3], ids=str)
def test_a_layer_with_a_collective_is_saved(world: Any, family: Family, tmp_path: Path) -> None:
    keras = family.keras

    class Mean(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def call(self, x: Any, training: bool = False) -> Any:
            return hvd.allreduce(x) if training else x

    model = keras.Sequential([keras.layers.Dense(2), Mean()])
    model.build((None, 3))
    together(lambda: model.save(str(tmp_path / "saved"), save_format="tf"))
    x = np.ones((2, 3), "float32")
    np.testing.assert_allclose(tf.saved_model.load(str(tmp_path / "saved"))(x), model(x), rtol=1e-6)


def test_what_touches_no_variable_keeps_its_place_beside_collectives(world: Any) -> None:
    seen: list[str] = []

    def noted(word: str) -> Any:
        def note() -> np.ndarray:
            time.sleep(0.01)
            seen.append(word)
            return np.zeros((), np.int8)

        return tf.numpy_function(note, [], tf.int8, stateful=True)

    variable = tf.Variable(0.0)

    @tf.function
    def step(x: Any) -> Any:
        noted("before")
        if x > 0:
            variable.assign_add(hvd.allreduce(x))
        total = hvd.allreduce(x)
        noted("after")
        return total

    together(lambda: [step(tf.constant(1.0)) for _ in range(3)])
    assert seen == ["before", "after"] * 3
