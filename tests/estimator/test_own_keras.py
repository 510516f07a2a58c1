"""Estimator.from_keras: a compiled model of each Keras in the graphs of an Estimator trains as model.fit does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.errors import ConfigurationError, UnsupportedError
from hvdx.estimator import own
from tests.conftest import installed_kerases, load_keras

from .own_models import FEATURES, LABELS, batches

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda keras: keras.optimizers.Adam(0.05, clipnorm=0.5),
    "SGD with a schedule": lambda keras: keras.optimizers.SGD(
        keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.01]), momentum=0.9
    ),
    "AdamW": lambda keras: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "legacy Adam": lambda keras: keras.optimizers.legacy.Adam(0.05, clipnorm=0.5),
    "legacy SGD": lambda keras: keras.optimizers.legacy.SGD(0.1, momentum=0.9, nesterov=True),
}


@pytest.fixture(params=installed_kerases())
def keras(request: pytest.FixtureRequest) -> Any:
    """Each Keras there is."""
    return load_keras(request.param)


def _model(keras: Any, optimizer: Any, **compiled: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.layers.InputLayer((3,)),
            keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1, name="value"),
        ]
    )
    model.compile(optimizer, "mse", **{"metrics": ["mae", keras.metrics.RootMeanSquaredError()], **compiled})
    return model


def _assert_same(estimator: own.Estimator, model: Any, features: Any, rtol: float = 1e-3) -> None:
    """Both predict the same; in this, weights and moving statistics all have a part."""

    def data() -> Any:
        return tf.data.Dataset.from_tensor_slices(features).batch(8)

    expected = model.predict(data(), verbose=0)
    names = ["value"] if not isinstance(expected, list) else ["value", "sign"]
    for name, values in zip(names, expected if isinstance(expected, list) else [expected], strict=True):
        rows = [row[name] for row in estimator.predict(data)]
        np.testing.assert_allclose(rows, values, rtol=rtol, atol=1e-5)


def _batched(*parts: Any, size: int = 8) -> Any:
    return tf.data.Dataset.from_tensor_slices(parts).batch(size)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_fit(name: str, keras: Any, tmp_path: Path) -> None:
    if name.startswith("legacy") and keras.__version__ >= "3":
        return  # Keras 3 has no legacy optimizers
    model = _model(keras, OPTIMIZERS[name](keras))
    start = model.get_weights()
    estimator = own.Estimator.from_keras(model, str(tmp_path))
    estimator.train(batches(repeat=2), steps=3)
    estimator.train(batches(repeat=2), steps=1)  # resumes the optimizer's state and the place in its schedule
    assert all((a == b).all() for a, b in zip(start, model.get_weights(), strict=True))
    model.fit(_batched(FEATURES, LABELS), verbose=0)
    model.fit(_batched(FEATURES[:8], LABELS[:8]), verbose=0)
    _assert_same(estimator, model, FEATURES)
    assert estimator.get_variable_value("global_step") == 4


def test_evaluation_and_prediction_before_any_training_are_those_of_the_model(keras: Any, tmp_path: Path) -> None:
    model = _model(keras, "sgd")
    model.fit(FEATURES, LABELS, batch_size=8, epochs=2, verbose=0)
    estimator = own.Estimator.from_keras(model, str(tmp_path))
    expected = model.evaluate(FEATURES, LABELS, batch_size=24, return_dict=True, verbose=0)
    found = estimator.evaluate(batches(size=24))
    assert found.pop("global_step") == 0
    assert found == pytest.approx(expected, rel=1e-4)
    _assert_same(estimator, model, FEATURES, rtol=1e-4)


def _two_headed(keras: Any) -> Any:
    keras.utils.set_random_seed(4)
    inputs = [keras.Input((2,), name="left"), keras.Input((1,), name="right")]
    joined = keras.layers.Concatenate()(inputs)
    outputs = [keras.layers.Dense(1, name="value")(joined), keras.layers.Dense(1, "sigmoid", name="sign")(joined)]
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(0.1),
        {"value": "mse", "sign": "binary_crossentropy"},
        loss_weights={"value": 0.5, "sign": 2.0},
        metrics={"sign": ["accuracy"]},
    )
    return model


def test_inputs_and_outputs_by_name_and_sample_weights(keras: Any, tmp_path: Path) -> None:
    model = _two_headed(keras)
    features = {"left": FEATURES[:, :2], "right": FEATURES[:, 2:]}
    labels = {"value": LABELS, "sign": (LABELS > 0).astype("float32")}
    weights = np.linspace(0, 1, 24).astype("float32")

    def weighted() -> Any:
        both = {"features": features, "sample_weights": weights}  # one for both outputs
        return tf.data.Dataset.from_tensor_slices((both, labels)).batch(8)

    def plain() -> Any:
        return tf.data.Dataset.from_tensor_slices((features, labels)).batch(24)

    estimator = own.Estimator.from_keras(model, str(tmp_path), metric_names_map={"sign_accuracy": "hits"})
    estimator.train(weighted)
    model.fit(_batched(features, tuple(labels.values()), (weights, weights)), verbose=0)
    _assert_same(estimator, model, features)
    values = estimator.evaluate(plain)
    expected = model.evaluate(_batched(features, tuple(labels.values()), size=24), return_dict=True, verbose=0)
    assert (values["loss"], values["hits"]) == pytest.approx((expected["loss"], expected["sign_accuracy"]), rel=1e-3)
    assert set(next(estimator.predict(plain))) == {"value", "sign"}

    def lacking() -> Any:
        return tf.data.Dataset.from_tensor_slices(({"left": FEATURES[:, :2]}, labels)).batch(8)

    with pytest.raises(ConfigurationError, match="right"):
        estimator.train(lacking)


def test_a_distributed_optimizer_stays_distributed(
    keras: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvdx.training.reducer import GradientReducer

    seen: list[int] = []
    reduce = GradientReducer.reduce

    def counted(self: Any, gradients: Any, variables: Any) -> Any:
        seen.append(len(gradients))
        return reduce(self, gradients, variables)

    monkeypatch.setattr(GradientReducer, "reduce", counted)
    kinds = [keras.optimizers.SGD] if keras.__version__ >= "3" else [keras.optimizers.SGD, keras.optimizers.legacy.SGD]
    for number, kind in enumerate(kinds):
        model = _model(keras, hvd.DistributedOptimizer(kind(0.1)))
        own.Estimator.from_keras(model, str(tmp_path / str(number))).train(batches())
    assert seen == [6] * len(kinds)


def test_the_exported_model_gives_the_predictions_of_the_trained_one(keras: Any, tmp_path: Path) -> None:
    estimator = own.Estimator.from_keras(_model(keras, "adam"), str(tmp_path / "model")).train(batches())
    rows = [row["value"] for row in estimator.predict(batches())]

    def receiver() -> Any:
        placeholder = tf.compat.v1.placeholder(tf.float32, [None, 3])
        return own.export.TensorServingInputReceiver(placeholder, {"x": placeholder})

    loaded = tf.saved_model.load(estimator.export_saved_model(str(tmp_path / "export"), receiver).decode())
    served = loaded.signatures["serving_default"](x=tf.constant(FEATURES))["value"]
    np.testing.assert_allclose(served, np.array(rows), rtol=1e-5)


def test_a_subclassed_model_with_a_config(keras: Any, tmp_path: Path) -> None:
    class Plain(keras.Model):
        def __init__(self, units: int) -> None:
            super().__init__()
            self.units, self.dense = units, keras.layers.Dense(units)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def get_config(self) -> dict[str, Any]:
            return {"units": self.units}

    model = Plain(1)
    model(FEATURES[:1])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    estimator = own.Estimator.from_keras(model, str(tmp_path)).train(batches())
    model.fit(FEATURES, LABELS, batch_size=8, shuffle=False, verbose=0)
    expected = model.predict(FEATURES, verbose=0)
    rows = [row["output_1"] for row in estimator.predict(batches())]
    np.testing.assert_allclose(rows, expected, rtol=1e-3, atol=1e-5)


def test_dropout_and_its_seed_train(keras: Any, tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.InputLayer((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    losses = []

    class Losses(own.SessionRunHook):
        def before_run(self, run_context: Any) -> Any:
            return own.SessionRunArgs(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)[-1])

        def after_run(self, run_context: Any, run_values: Any) -> None:
            losses.append(float(run_values.results))

    estimator = own.Estimator.from_keras(model, str(tmp_path))
    estimator.train(batches(size=24, repeat=6), hooks=[Losses()])
    assert len(set(losses)) == 6
    assert estimator.evaluate(batches())["loss"] == estimator.evaluate(batches())["loss"]


def test_what_cannot_be_taken_is_refused(keras: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not compiled"):
        own.Estimator.from_keras(keras.Sequential([keras.layers.Dense(1)]), str(tmp_path))
    with pytest.raises(ConfigurationError, match="tf_keras"):
        own.Estimator.from_keras("model", str(tmp_path))
    mixed = getattr(keras, "mixed_precision", keras.optimizers)
    scaled = getattr(mixed, "LossScaleOptimizer", None) or keras.optimizers.LossScaleOptimizer
    with pytest.raises(UnsupportedError, match="scales the loss"):
        own.Estimator.from_keras(_model(keras, scaled(keras.optimizers.SGD())), str(tmp_path))
    if keras.__version__ >= "3":
        accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
        with pytest.raises(UnsupportedError, match="gradient_accumulation_steps"):
            own.Estimator.from_keras(_model(keras, accumulating), str(tmp_path))

    class NoConfig(keras.Model):
        def __init__(self, dense: Any) -> None:
            super().__init__()
            self.dense = dense

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

    model = NoConfig(keras.layers.Dense(1))
    model(FEATURES[:1])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigurationError, match="get_config"):
        own.Estimator.from_keras(model, str(tmp_path)).train(batches())
