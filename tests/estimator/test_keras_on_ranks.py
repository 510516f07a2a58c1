"""Keras in Estimators on several ranks: its optimizers in a model_fn, its models through from_keras; against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator
from tests.conftest import installed_kerases, load_keras
from tests.estimator import distributed_models as models
from tests.estimator.watching import Watch, shared_folder

v1 = tf.compat.v1
pytestmark = pytest.mark.np(2, plain=False)
WITH_LEGACY = [name for name in installed_kerases() if name != "keras3"]


def legacy_model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
    """Linear regression with a legacy Adam that counts the global step, as programs were moved to TensorFlow 2."""
    optimizer = load_keras(params["keras"]).optimizers.legacy.Adam(0.1)
    optimizer.iterations = v1.train.get_or_create_global_step()
    if params["distributed"]:
        hvd.DistributedOptimizer(optimizer)
    with tf.GradientTape() as tape:
        kernel = v1.get_variable("kernel", [models.WIDTH, 1], initializer=v1.random_normal_initializer(seed=1))
        bias = v1.get_variable("bias", [1], initializer=v1.zeros_initializer())
        loss = tf.reduce_mean(tf.square(tf.matmul(features["x"], kernel) + bias - labels))
    if mode == estimator.ModeKeys.EVAL:
        return estimator.EstimatorSpec(mode, loss=loss)
    if params["how"] == "get_updates":
        [update] = optimizer.get_updates(loss, [kernel, bias])
    else:
        update = optimizer.minimize(loss, [kernel, bias], tape=tape)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=update)


@pytest.mark.parametrize("how", ["get_updates", "minimize"])
@pytest.mark.parametrize("name", WITH_LEGACY)
def test_a_legacy_optimizer_in_a_model_fn(world: Any, tmp_path: Path, name: str, how: str) -> None:
    config = estimator.RunConfig(save_checkpoints_steps=4, tf_random_seed=1 + world.rank())
    params = {"keras": name, "how": how}

    def make(folder: Path, distributed: bool, settings: Any) -> Any:
        return estimator.Estimator(legacy_model_fn, str(folder), settings, {**params, "distributed": distributed})

    alone, expected = make(tmp_path / "alone", False, config.replace(tf_random_seed=1)), Watch()
    alone.train(models.whole_input, hooks=[expected], max_steps=models.STEPS)
    watch = Watch()
    mine = make(shared_folder(world, tmp_path), True, config)
    metrics, _ = estimator.train_and_evaluate(mine, *models.specs(hooks=[watch]))
    assert metrics is not None
    assert metrics["global_step"] == models.STEPS
    check(watch, expected, world)
    assert metrics["loss"] == pytest.approx(alone.evaluate(models.eval_input)["loss"], rel=1e-4)


def keras_model(keras: Any, seed: int, wrap: bool) -> Any:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    inputs = keras.Input((models.WIDTH,), name="x")
    outputs = layers.Dense(1, name="y")(layers.Dense(4, "tanh", name="hidden")(inputs))
    model = keras.Model(inputs, outputs, name="small")  # named, so that the variables' names are those of every copy
    optimizer = keras.optimizers.Adam(0.05)
    model.compile(hvd.DistributedOptimizer(optimizer) if wrap else optimizer, "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("evaluation", ["rank 0", "sharded"])
def test_from_keras(keras: Any, world: Any, tmp_path: Path, evaluation: str) -> None:
    """Each rank hands in a model with weights of its own; all train rank 0's."""
    config = estimator.RunConfig(save_checkpoints_steps=4)
    first = estimator.Estimator.from_keras(keras_model(keras, 1, wrap=False), str(tmp_path / "alone"), config)
    expected = Watch()
    first.train(models.whole_input, hooks=[expected], max_steps=models.STEPS)
    wanted = first.evaluate(models.eval_input)

    watch = Watch()
    model = keras_model(keras, 1 + world.rank(), wrap=True)
    mine = estimator.Estimator.from_keras(model, str(shared_folder(world, tmp_path)), config)
    specs = models.specs(hooks=[watch])
    metrics, _ = estimator.train_and_evaluate(mine, *specs, evaluation=evaluation)
    assert metrics is not None
    assert metrics["global_step"] == models.STEPS
    check(watch, expected, world)
    assert set(metrics) == set(wanted)
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4), name


def check(watch: Watch, expected: Watch, world: Any) -> None:
    assert len(watch.losses) == models.STEPS
    np.testing.assert_allclose(np.mean(world.allgather_object(watch.losses), 0), expected.losses, rtol=1e-4)
    watch.check_same_as(expected.weights, world)
