"""Estimator.from_keras: a compiled tf_keras model in the graphs of an Estimator trains as model.fit trains it."""

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

if not {"tf_keras", "keras2"} & set(installed_kerases()):
    pytest.skip("no tf_keras and no Keras 2", allow_module_level=True)
keras = load_keras("tf_keras" if "tf_keras" in installed_kerases() else "keras2")

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "new Adam": lambda: keras.optimizers.Adam(0.05, clipnorm=0.5),
    "new SGD with a schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.01]), momentum=0.9
    ),
    "new AdamW": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "legacy Adam": lambda: keras.optimizers.legacy.Adam(0.05, clipnorm=0.5),
    "legacy SGD": lambda: keras.optimizers.legacy.SGD(0.1, momentum=0.9, nesterov=True),
}


def _model(optimizer: Any, **compiled: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.layers.Dense(4, activation="tanh", input_shape=(3,), kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1, name="value"),
        ]
    )
    model.compile(optimizer, "mse", **{"metrics": ["mae", keras.metrics.RootMeanSquaredError()], **compiled})
    return model


def _weights(estimator: own.Estimator, model: Any) -> list[Any]:
    return [estimator.get_variable_value(variable.name.split(":")[0]) for variable in model.weights]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_fit(name: str, tmp_path: Path) -> None:
    model = _model(OPTIMIZERS[name]())
    estimator = own.Estimator.from_keras(model, str(tmp_path))
    estimator.train(batches(repeat=2), steps=3)
    estimator.train(batches(repeat=2), steps=1)  # resumes the optimizer's state and the place in its schedule
    model.fit(tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(8), shuffle=False, verbose=0)
    model.fit(FEATURES[:8], LABELS[:8], batch_size=8, verbose=0)
    for ours, theirs in zip(_weights(estimator, model), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert estimator.get_variable_value("global_step") == 4


def test_evaluation_and_prediction_before_any_training_are_those_of_the_model(tmp_path: Path) -> None:
    model = _model("sgd")
    model.fit(FEATURES, LABELS, batch_size=8, epochs=2, verbose=0)
    estimator = own.Estimator.from_keras(model, str(tmp_path))
    expected = model.evaluate(FEATURES, LABELS, batch_size=24, return_dict=True, verbose=0)
    found = estimator.evaluate(batches(size=24))
    assert found.pop("global_step") == 0
    assert found == pytest.approx(expected, rel=1e-4)
    rows = [row["value"] for row in estimator.predict(batches())]
    np.testing.assert_allclose(rows, model.predict(FEATURES, verbose=0), rtol=1e-4, atol=1e-5)


def _two_headed() -> Any:
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


def test_inputs_and_outputs_by_name_and_sample_weights(tmp_path: Path) -> None:
    model = _two_headed()
    features = {"left": FEATURES[:, :2], "right": FEATURES[:, 2:]}
    labels = {"value": LABELS, "sign": (LABELS > 0).astype("float32")}
    weights = np.linspace(0, 1, 24).astype("float32")

    def weighted() -> Any:
        both = {"features": features, "sample_weights": weights}
        return tf.data.Dataset.from_tensor_slices((both, labels)).batch(8)

    def plain() -> Any:
        return tf.data.Dataset.from_tensor_slices((features, labels)).batch(24)

    estimator = own.Estimator.from_keras(model, str(tmp_path), metric_names_map={"sign_accuracy": "hits"})
    estimator.train(weighted)
    model.fit(tf.data.Dataset.from_tensor_slices((features, labels, weights)).batch(8), shuffle=False, verbose=0)
    for ours, theirs in zip(_weights(estimator, model), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    values = estimator.evaluate(plain)
    expected = model.evaluate(plain(), return_dict=True, verbose=0)
    assert (values["loss"], values["hits"]) == pytest.approx((expected["loss"], expected["sign_accuracy"]), rel=1e-3)
    assert set(next(estimator.predict(plain))) == {"value", "sign"}

    def lacking() -> Any:
        return tf.data.Dataset.from_tensor_slices(({"left": FEATURES[:, :2]}, labels)).batch(8)

    with pytest.raises(ConfigurationError, match="right"):
        estimator.train(lacking)


def test_a_distributed_optimizer_stays_distributed(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdx.training.reducer import GradientReducer

    seen: list[int] = []
    reduce = GradientReducer.reduce

    def counted(self: Any, gradients: Any, variables: Any) -> Any:
        seen.append(len(gradients))
        return reduce(self, gradients, variables)

    monkeypatch.setattr(GradientReducer, "reduce", counted)
    for number, optimizer in enumerate((keras.optimizers.SGD(0.1), keras.optimizers.legacy.SGD(0.1))):
        model = _model(hvd.DistributedOptimizer(optimizer))
        own.Estimator.from_keras(model, str(tmp_path / str(number))).train(batches())
    assert seen == [6, 6]


def test_the_exported_model_gives_the_predictions_of_the_trained_one(tmp_path: Path) -> None:
    estimator = own.Estimator.from_keras(_model("adam"), str(tmp_path / "model")).train(batches())
    rows = [row["value"] for row in estimator.predict(batches())]

    def receiver() -> Any:
        placeholder = tf.compat.v1.placeholder(tf.float32, [None, 3])
        return own.export.TensorServingInputReceiver(placeholder, {"x": placeholder})

    loaded = tf.saved_model.load(estimator.export_saved_model(str(tmp_path / "export"), receiver).decode())
    served = loaded.signatures["serving_default"](x=tf.constant(FEATURES))["value"]
    np.testing.assert_allclose(served, np.array(rows), rtol=1e-5)


def test_a_subclassed_model_with_a_config(tmp_path: Path) -> None:
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


def test_what_cannot_be_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not compiled"):
        own.Estimator.from_keras(keras.Sequential([keras.layers.Dense(1)]), str(tmp_path))
    with pytest.raises(ConfigurationError, match="tf_keras"):
        own.Estimator.from_keras("model", str(tmp_path))
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(UnsupportedError, match="scales the loss"):
        own.Estimator.from_keras(_model(scaled), str(tmp_path))


def test_a_model_of_keras_3_is_refused(tmp_path: Path) -> None:
    keras3 = pytest.importorskip("keras", minversion="3")
    model = keras3.Sequential([keras3.Input((3,)), keras3.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match="tf_keras"):
        own.Estimator.from_keras(model, str(tmp_path))
