"""The yardstick: the same model_fn under tf.estimator and hvdx.estimator.own gives the same numbers, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdx.estimator import own
from hvdx.estimator.own.from_keras import estimator_from_keras

from .own_models import FEATURES, LABELS, batches, linear_model_fn

pytest.importorskip("tensorflow_estimator", reason="the last TensorFlow with tf.estimator is 2.15")
original = tf.estimator
v1 = tf.compat.v1


def _random_model_fn(features: Any, labels: Any, mode: str, params: Any, *, api: Any) -> Any:
    """Random weights, dropout, batch normalization by hand, Adam with a schedule, hooks and a summary."""
    hidden = tf.nn.relu(tf.matmul(features, v1.get_variable("first", [3, 8])))
    if mode == api.ModeKeys.TRAIN:
        hidden = tf.nn.dropout(hidden, 0.3)
    out = tf.matmul(hidden, v1.get_variable("second", [8, 1], initializer=v1.truncated_normal_initializer()))
    if mode == api.ModeKeys.PREDICT:
        return api.EstimatorSpec(mode, predictions={"value": out})
    loss = v1.losses.mean_squared_error(labels, out)
    step = v1.train.get_global_step()
    rate = v1.train.exponential_decay(params["rate"], step, 2, 0.5)
    v1.summary.scalar("rate", rate)
    train_op = v1.train.AdamOptimizer(rate).minimize(loss, step)
    metrics = {
        "mae": v1.metrics.mean_absolute_error(labels, out),
        "rmse": v1.metrics.root_mean_squared_error(labels, out),
    }
    return api.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def _shuffled() -> Any:
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).shuffle(24).batch(5).repeat(3)


class _Losses(v1.train.SessionRunHook):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def before_run(self, run_context: Any) -> Any:
        return v1.train.SessionRunArgs(v1.get_collection(v1.GraphKeys.LOSSES)[-1])

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.seen.append(float(run_values.results))


def _run(api: Any, model_fn: Callable[..., Any], directory: Path, params: Any = None) -> dict[str, Any]:
    """Return all that a user sees of two trainings, evaluations and a prediction."""
    config = api.RunConfig(tf_random_seed=5, save_checkpoints_steps=4, save_summary_steps=3, keep_checkpoint_max=2)
    estimator = api.Estimator(functools.partial(model_fn, api=api), str(directory), config, params)
    losses = _Losses()
    estimator.train(_shuffled, hooks=[losses], steps=6)
    estimator.train(_shuffled, hooks=[losses], max_steps=9)
    estimator.train(_shuffled, hooks=[losses])
    names = estimator.get_variable_names()
    return {
        "losses": losses.seen,
        "evaluation": estimator.evaluate(batches(size=7), name="all"),
        "some": estimator.evaluate(batches(size=7), steps=2),
        "names": names,
        "values": {name: estimator.get_variable_value(name).tolist() for name in names},
        "predictions": [row["value"].item() for row in estimator.predict(batches(size=5))],
        # In between, TensorFlow's hooks may read the step before or after its increment: with either, runs differ.
        "checkpoint": Path(estimator.latest_checkpoint()).name,
        "number of checkpoints": len(list(directory.glob("model.ckpt-*.index"))),
        "summaries": {tag for _, tag in _tags(directory)},
        "evaluation summaries": _tags(directory / "eval_all"),
    }


def _tags(directory: Path) -> list[tuple[int, str]]:
    found = []
    for path in sorted(directory.glob("*.tfevents.*")):
        for event in v1.train.summary_iterator(str(path)):
            found += [(event.step, value.tag) for value in event.summary.value if value.tag != "global_step/sec"]
    return sorted(found)


@pytest.mark.parametrize(
    ("model_fn", "params"), [(_random_model_fn, {"rate": 0.05}), (linear_model_fn, None)], ids=["random", "linear"]
)
def test_the_same_model_fn_gives_the_same_run(model_fn: Callable[..., Any], params: Any, tmp_path: Path) -> None:
    ours = _run(own, model_fn, tmp_path / "own", params)
    theirs = _run(original, model_fn, tmp_path / "original", params)
    for name in theirs:
        assert ours[name] == theirs[name], name
    assert len(ours["losses"]) > 9


def test_one_continues_what_the_other_began(tmp_path: Path) -> None:
    for first, second in ((own, original), (original, own)):
        directory = str(tmp_path / first.__name__)
        first.Estimator(functools.partial(linear_model_fn, api=first), directory).train(batches(), steps=2)
        resumed = second.Estimator(functools.partial(linear_model_fn, api=second), directory).train(
            batches(), max_steps=4
        )
        assert resumed.get_variable_value("global_step") == 4
    a, b = (tf.train.load_variable(str(tmp_path / api.__name__), "weights") for api in (own, original))
    np.testing.assert_array_equal(a, b)


def test_hooks_are_called_in_the_same_order(tmp_path: Path) -> None:
    def calls_of(api: Any, directory: str) -> list[str]:
        calls: list[str] = []

        class Hook(v1.train.SessionRunHook):
            def __init__(self, name: str) -> None:
                self.name = name

            def begin(self) -> None:
                calls.append(f"begin {self.name}")

            def before_run(self, run_context: Any) -> None:
                calls.append(f"before {self.name}")

            def after_run(self, run_context: Any, run_values: Any) -> None:
                calls.append(f"after {self.name}")

            def end(self, session: Any) -> None:
                calls.append(f"end {self.name}")

        class Listener(v1.train.CheckpointSaverListener):
            def after_save(self, session: Any, global_step_value: int) -> None:
                calls.append(f"saved {global_step_value}")

        def model_fn(features: Any, labels: Any, mode: str) -> Any:
            names = ("training_hooks", "training_chief_hooks", "evaluation_hooks", "prediction_hooks")
            spec = linear_model_fn(features, labels, mode, api=api)
            return spec._replace(**{name: (Hook(name),) for name in names})

        estimator = api.Estimator(model_fn, directory, api.RunConfig(save_checkpoints_steps=2))
        estimator.train(batches(), hooks=[Hook("user")], saving_listeners=[Listener()])
        estimator.evaluate(batches(), hooks=[Hook("user")])
        list(estimator.predict(batches(), hooks=[Hook("user")]))
        return calls

    assert calls_of(own, str(tmp_path / "a")) == calls_of(original, str(tmp_path / "b"))


def test_run_configs_have_the_same_settings() -> None:
    for given in ({}, {"save_checkpoints_steps": 3}, {"save_checkpoints_secs": None, "tf_random_seed": 1}):
        ours, theirs = own.RunConfig(**given), original.RunConfig(**given)
        for name in [name for name in dir(theirs) if not name.startswith("_") and name != "replace"]:
            expected = getattr(theirs, name)
            assert getattr(ours, name) == expected or not (getattr(ours, name) or expected), name


def _keras_model() -> Any:
    keras = tf.keras
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.layers.Dense(4, "tanh", input_shape=(3,)), keras.layers.Dense(1, name="value")])
    model.compile(keras.optimizers.legacy.Adam(0.05), "mse", metrics=["mae"])
    return model


def test_from_keras_gives_what_model_to_estimator_gave(tmp_path: Path) -> None:
    found = []
    for directory, make in (
        ("own", lambda path: own.Estimator.from_keras(_keras_model(), path)),
        (
            "own model_fn",
            lambda path: estimator_from_keras(
                original.Estimator, _keras_model(), path, spec_class=original.EstimatorSpec
            ),
        ),
        ("original", lambda path: tf.keras.estimator.model_to_estimator(_keras_model(), model_dir=path)),
    ):
        estimator = make(str(tmp_path / directory))
        start = estimator.evaluate(batches())
        estimator.train(batches(), steps=3)
        rows = [row["value"].item() for row in estimator.predict(batches())]
        found.append((start, estimator.evaluate(batches()), rows))
    their_start, their_end, their_rows = found.pop()
    for start, end, rows in found:
        assert start == pytest.approx(their_start, rel=1e-5)
        assert end == pytest.approx(their_end, rel=1e-5)
        assert rows == pytest.approx(their_rows, rel=1e-4, abs=1e-6)


def _keras_layers_model_fn(features: Any, labels: Any, mode: str, *, api: Any) -> Any:
    """Layers, a loss and a metric of Keras inside a model_fn, and v1 layers."""
    training = mode == api.ModeKeys.TRAIN
    hidden = tf.keras.layers.BatchNormalization()(tf.keras.layers.Dense(6, "relu")(features), training=training)
    out = v1.layers.dense(v1.layers.dropout(hidden, 0.2, training=training), 1)
    if mode == api.ModeKeys.PREDICT:
        return api.EstimatorSpec(mode, predictions={"value": out})
    loss = tf.keras.losses.Huber()(labels, out)
    metric = tf.keras.metrics.MeanAbsoluteError()
    metric.update_state(labels, out)
    train_op = v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss, v1.train.get_global_step())
    return api.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops={"mae": metric})


def test_a_model_fn_of_keras_layers_gives_the_same_run(tmp_path: Path) -> None:
    found = []
    for api in (own, original):
        tf.keras.backend.clear_session()  # or the layers of the second one get other names
        tf.keras.utils.set_random_seed(6)  # Keras has seeds of its own
        found.append(_run(api, _keras_layers_model_fn, tmp_path / api.__name__))
    assert found[0] == found[1]
