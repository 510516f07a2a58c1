"""Keras optimizers that accumulate, in Estimators: passes of several ranks against one process with their union."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator
from hvdx.estimator.own.keras_optimizer import optimizer_recipe, update_keras_3
from hvdx.training.graphs import in_program_order
from hvdx.training.xla import is_distributed
from tests.conftest import installed_kerases, load_keras
from tests.estimator import distributed_models as models
from tests.estimator.watching import Watch, shared_folder

v1 = tf.compat.v1
pytestmark = pytest.mark.np(2)
PASSES = 2
FIRST = models.STEPS // 2  # updates before the training is resumed
WITH_LEGACY = [name for name in installed_kerases() if name != "keras3"]


def minimize(optimizer: Any, loss: Any, variables: list[Any], tape: Any) -> Any:
    return optimizer.minimize(loss, variables, tape=tape)


def get_updates(optimizer: Any, loss: Any, variables: list[Any], tape: Any) -> Any:
    return optimizer.get_updates(loss, variables[:2])[0]  # it refuses a variable without a gradient


def apply_gradients(optimizer: Any, loss: Any, variables: list[Any], tape: Any) -> Any:
    pairs = list(zip(tf.gradients(loss, variables), variables, strict=True))
    if is_distributed(optimizer):
        return optimizer.apply_gradients(pairs)
    optimizer.build(variables)
    return in_program_order(lambda: optimizer.apply_gradients(pairs))  # without, Keras trains nothing in a graph


def as_from_keras_does(optimizer: Any, loss: Any, variables: list[Any], tape: Any) -> Any:
    return update_keras_3(optimizer_recipe(optimizer), loss, variables)[0]


class Case(NamedTuple):
    """Whose optimizer it is, and how it makes its update."""

    keras: str
    legacy: bool
    how: Callable[..., Any]

    def optimizer(self) -> Any:
        optimizers = load_keras(self.keras).optimizers
        options = {"momentum": 0.9, "global_clipnorm": 0.5, "name": "sgd"}
        if self.legacy or self.keras == "keras3":
            decay = optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)  # by the number of updates
            return (optimizers.legacy if self.legacy else optimizers).SGD(decay, **options)
        return optimizers.SGD(0.1, weight_decay=0.1, **options)

    def variables(self, seed: int) -> list[Any]:
        """Return a kernel, a table of two rows, and a variable that nothing depends on."""
        shapes = {"kernel": (models.WIDTH, 1), "table": (2, 1), "idle": (1,)}
        values = np.random.default_rng(seed)
        if self.keras == "keras3":
            make = load_keras("keras3").Variable
            return [make(values.normal(size=shape).astype("float32"), name=name) for name, shape in shapes.items()]
        initial = {name: v1.constant_initializer(values.normal(size=shape)) for name, shape in shapes.items()}
        return [v1.get_variable(name, shape, initializer=initial[name]) for name, shape in shapes.items()]


CASES = [Case(name, True, how) for name in WITH_LEGACY for how in (minimize, get_updates)]
CASES += [Case(name, False, apply_gradients) for name in WITH_LEGACY]
CASES += [Case("keras3", False, as_from_keras_does)] if "keras3" in installed_kerases() else []


def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
    """Linear regression with a table, whose gradient is sparse on several ranks.

    Not in the reference: TensorFlow counts a row that occurs twice in a batch as two rows of the norm.
    """
    case: Case = params["case"]
    with tf.GradientTape() as tape:
        variables = case.variables(params["seed"])
        kernel, table, _ = (v if isinstance(v, tf.Variable) else v.value for v in variables)
        rows = tf.cast(features["x"][:, 0] > 0, tf.int32)
        found = tf.nn.embedding_lookup(table, rows) if params["passes"] > 1 else tf.one_hot(rows, 2) @ table
        loss = tf.reduce_mean(tf.square(features["x"] @ kernel + found - labels))
    v1.losses.add_loss(loss)
    if mode == estimator.ModeKeys.EVAL:
        return estimator.EstimatorSpec(mode, loss=loss)
    optimizer = case.optimizer()
    if case.how is not as_from_keras_does:
        optimizer.iterations = v1.train.get_or_create_global_step()
    if params["passes"] > 1:
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=params["passes"])
    train_op = case.how(optimizer, loss, variables, tape)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def passes(first: int, last: int) -> Callable[[Any], Any]:
    """Return an input_fn of this rank's passes from one number to another; a step of one process is PASSES of them."""

    def input_fn(input_context: Any) -> Any:
        data = models.sharded_input(input_context).unbatch()
        data = data.batch(models.BATCH // PASSES // input_context.num_input_pipelines)
        return data.skip(first).take(last - first)

    return input_fn


def check(mine: Watch, alone: Watch, folder: Path, world: Any) -> None:
    """Assert that the weights are right, and that no checkpoint holds a sum."""
    mine.check_same_as(alone.weights, world)
    names = [name for name, _ in tf.train.list_variables(str(folder))] if world.rank() == 0 else []
    assert not any("hvdx" in name or "accumulator" in name for name in names)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.keras}-{case.how.__name__}-{case.legacy:d}")
def test_in_a_model_fn(world: Any, tmp_path: Path, case: Case) -> None:
    """A pass that is left over when the input ends is forgotten; the resumed training makes the updates after it."""
    config = estimator.RunConfig(save_checkpoints_steps=100)
    params = {"case": case, "seed": 0, "passes": 1}
    alone, expected = estimator.Estimator(model_fn, str(tmp_path / "alone"), config, params), Watch()
    alone.train(models.whole_input, hooks=[expected], max_steps=models.STEPS)

    folder = shared_folder(world, tmp_path)
    params = {"case": case, "seed": world.rank(), "passes": PASSES}
    mine = estimator.Estimator(model_fn, str(folder), config, params)
    before, after = Watch(), Watch()
    first = models.specs(passes(0, PASSES * FIRST + 1), max_steps=None, hooks=[before])
    metrics, _ = estimator.train_and_evaluate(mine, *first)
    assert metrics is not None
    assert (metrics["global_step"], len(before.losses)) == (FIRST, PASSES * FIRST + 1)
    second = models.specs(passes(PASSES * FIRST, PASSES * models.STEPS), hooks=[after])
    metrics, _ = estimator.train_and_evaluate(mine, *second)
    assert metrics is not None
    assert (metrics["global_step"], len(after.losses)) == (models.STEPS, PASSES * (models.STEPS - FIRST))
    check(after, expected, folder, world)
    assert metrics["loss"] == pytest.approx(alone.evaluate(models.eval_input)["loss"], rel=1e-4)


@pytest.mark.parametrize("name", WITH_LEGACY)
def test_from_keras(world: Any, tmp_path: Path, name: str) -> None:
    keras = load_keras(name)

    def model(seed: int, wrap: Callable[[Any], Any]) -> Any:
        keras.utils.set_random_seed(seed)
        made = keras.Sequential([keras.Input((models.WIDTH,), name="x"), keras.layers.Dense(1, name="y")], name="small")
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        made.compile(wrap(keras.optimizers.Adam(decay, global_clipnorm=0.5)), "mse")
        return made

    config = estimator.RunConfig(save_checkpoints_steps=100)
    alone = estimator.Estimator.from_keras(model(0, lambda optimizer: optimizer), str(tmp_path / "alone"), config)
    expected, watch, folder = Watch(), Watch(), shared_folder(world, tmp_path)
    alone.train(models.whole_input, hooks=[expected], max_steps=models.STEPS)
    wrapped = model(world.rank(), lambda o: hvd.DistributedOptimizer(o, backward_passes_per_step=PASSES))
    mine = estimator.Estimator.from_keras(wrapped, str(folder), config)
    metrics, _ = estimator.train_and_evaluate(mine, *models.specs(passes(0, PASSES * models.STEPS), hooks=[watch]))
    assert metrics is not None
    assert (metrics["global_step"], len(watch.losses)) == (models.STEPS, PASSES * models.STEPS)
    check(watch, expected, folder, world)
