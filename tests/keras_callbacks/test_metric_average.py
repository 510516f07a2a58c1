"""MetricAverageCallback: exact global values for every callback, one decision for all ranks."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdx as hvd
from hvdx import keras_api
from keras_callbacks import metric_states
from keras_callbacks.metric_states import Phase, Report

pytestmark = pytest.mark.np(2)

rng = np.random.default_rng(5)
X = rng.normal(size=(23, 4)).astype("float32")
Y = (rng.random((23, 1)) > 0.4).astype("float32")
W = rng.random(23).astype("float32")


def mine(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """An uneven part of the samples: the last rank gets the most."""
    bounds = [0, *(5 * (r + 1) for r in range(hvd.size() - 1)), len(X)]
    part = slice(bounds[hvd.rank()], bounds[hvd.rank() + 1])
    return tuple(array[part] for array in arrays)


def build(keras: Any, rate: float = 0.0, wrap: bool = True) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
    optimizer = keras.optimizers.SGD(rate)
    model.compile(
        hvd.DistributedOptimizer(optimizer) if wrap else optimizer,
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")],
        weighted_metrics=[keras.metrics.MeanSquaredError(name="mse")],
    )
    return model


def steps() -> dict[str, int]:
    """One full-batch step on every rank, so that no rank takes more steps than another."""
    return {"batch_size": 64, "epochs": 2, "verbose": 0}


@pytest.mark.np(2, 3)
def test_history_is_that_of_one_process(keras: Any) -> None:
    reference = build(keras, wrap=False).fit(X, Y, sample_weight=W, validation_data=(X, Y, W), **steps()).history
    x, y, w = mine(X, Y, W)
    history = (
        build(keras)
        .fit(
            x,
            y,
            sample_weight=w,
            validation_data=(x, y, w),
            callbacks=[hvd.callbacks.MetricAverageCallback()],
            **steps(),
        )
        .history
    )
    everyone = hvd.allgather_object(history)
    assert all(other == everyone[0] for other in everyone)
    assert set(history) == set(reference)
    for name, values in reference.items():
        np.testing.assert_allclose(history[name], values, rtol=2e-6, err_msg=name)


def test_every_callback_sees_it_whatever_the_order(keras: Any, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Reader(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            seen.append(dict(logs or {}))

        def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
            seen.append(dict(logs or {}))

    table = tmp_path / f"{hvd.rank()}.csv"
    x, y = mine(X, Y)
    model = build(keras, 0.1)
    history = model.fit(
        x, y, validation_data=mine(X, Y), **steps(),
        callbacks=[Reader(), keras.callbacks.CSVLogger(table), hvd.callbacks.MetricAverageCallback()],
    ).history  # fmt: skip
    rows = list(csv.DictReader(table.open()))
    everyone = hvd.allgather_object((seen, rows))
    assert all(other == everyone[0] for other in everyone)
    for epoch in range(2):
        for name, values in history.items():
            assert seen[epoch][name] == values[epoch]
            assert float(rows[epoch][name]) == pytest.approx(values[epoch], rel=1e-12)
    assert seen[2] == seen[1]  # fit hands its last logs to on_train_end


def test_progress_bar_ends_with_it(keras: Any, capfd: pytest.CaptureFixture[str]) -> None:
    x, y = mine(X, Y)
    options = dict(steps(), verbose=2, epochs=1)
    history = build(keras).fit(x, y, callbacks=[hvd.callbacks.MetricAverageCallback()], **options).history
    assert f"loss: {history['loss'][0]:.4f}" in capfd.readouterr().out


def test_evaluate_returns_it(keras: Any) -> None:
    reference = build(keras, wrap=False).evaluate(X, Y, verbose=0, return_dict=True)
    x, y = mine(X, Y)
    model = build(keras)
    callback = hvd.callbacks.MetricAverageCallback()
    result = model.evaluate(x, y, verbose=0, return_dict=True, batch_size=2, callbacks=[callback])
    listed = model.evaluate(x, y, verbose=0, callbacks=[callback])
    everyone = hvd.allgather_object((result, listed))
    alone = model.evaluate(x, y, verbose=0, return_dict=True)  # without the callback it is the rank's own again
    assert all(other == everyone[0] for other in everyone)
    for name, value in reference.items():
        assert result[name] == pytest.approx(value, rel=2e-6)
    assert sorted(listed) == pytest.approx(sorted(result.values()), rel=2e-6)
    if hvd.size() > 1:
        assert alone["loss"] != pytest.approx(result["loss"], rel=1e-6)


def test_validation_on_one_rank_only(keras: Any, caplog: pytest.LogCaptureFixture) -> None:
    x, y = mine(X, Y)
    model = build(keras, 0.1)
    logging.getLogger("hvdx").addHandler(caplog.handler)
    try:
        history = model.fit(
            x, y, validation_data=(X[:7], Y[:7]) if hvd.rank() == 0 else None, **steps(),
            callbacks=[hvd.callbacks.MetricAverageCallback()],
        ).history  # fmt: skip
    finally:
        logging.getLogger("hvdx").removeHandler(caplog.handler)
    everyone = hvd.allgather_object(history)
    assert all(other == everyone[0] for other in everyone)
    last = model.evaluate(X[:7], Y[:7], verbose=0, return_dict=True)
    assert history["val_loss"][-1] == pytest.approx(last["loss"], rel=2e-6)
    assert history["val_auc"][-1] == pytest.approx(last["auc"], rel=2e-6)
    assert caplog.text.count("val_loss (rank 0)") == (1 if hvd.size() > 1 else 0)


def test_callbacks_decide_alike(keras: Any, tmp_path: Path) -> None:
    """Left alone, each rank would stop and lower its rate by its own validation loss, and the others would hang."""
    x, y = mine(X, Y)
    model = build(keras, 2.0)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.02)
    target = tmp_path / f"{hvd.rank()}.weights.h5"
    best = keras.callbacks.ModelCheckpoint(str(target), monitor="val_loss", save_best_only=True, save_weights_only=True)
    wrong = 1.0 - y if hvd.rank() else y  # the ranks' own losses go in opposite directions
    history = model.fit(
        x, y, validation_data=(x, wrong), batch_size=64, epochs=12, verbose=0,
        callbacks=[stop, plateau, best, hvd.callbacks.MetricAverageCallback()],
    ).history  # fmt: skip
    weights = [w.tobytes() for w in model.get_weights()]
    saved = build(keras)
    saved.load_weights(str(target))
    decisions = (
        len(history["loss"]), stop.best_epoch, keras_api.learning_rate(model.optimizer), weights,
        [w.tobytes() for w in saved.get_weights()],
    )  # fmt: skip
    everyone = hvd.allgather_object(decisions)
    assert all(other == everyone[0] for other in everyone)
    assert stop.best_epoch == int(np.argmin(history["val_loss"]))


def test_one_rank_asks_to_stop_and_changes_the_rate(keras: Any) -> None:
    class Odd(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            if hvd.rank() == hvd.size() - 1 and epoch == 1:
                self.model.stop_training = True
            if epoch == 0:
                keras_api.set_learning_rate(self.model.optimizer, 0.5 / (1 + hvd.rank()))

    x, y = mine(X, Y)
    model = build(keras, 0.1)
    history = model.fit(x, y, batch_size=64, epochs=5, verbose=0,
                        callbacks=[hvd.callbacks.MetricAverageCallback(), Odd()]).history  # fmt: skip
    everyone = hvd.allgather_object((len(history["loss"]), keras_api.learning_rate(model.optimizer)))
    assert everyone == [(2, 0.5)] * hvd.size()


def test_values_that_are_no_metrics(keras: Any) -> None:
    import tensorflow as tf

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = keras.layers.Dense(1)
            self.seen = keras.metrics.Mean(name="seen")

        def call(self, x: Any) -> Any:
            return self.out(x)

        @property
        def metrics(self) -> list[Any]:
            return [self.seen]

        def train_step(self, data: Any) -> dict[str, Any]:
            self.seen.update_state(data[0])
            return {"seen": self.seen.result(), "rank": tf.constant(float(hvd.rank()))}

    model = Net()
    model.compile("sgd", "mse")
    x, y = mine(X, Y)
    history = model.fit(x, y, callbacks=[hvd.callbacks.MetricAverageCallback()], **steps()).history
    np.testing.assert_allclose(history["seen"][-1], X.mean(), rtol=1e-5)
    assert history["rank"] == [(hvd.size() - 1) / 2] * 2


def test_a_list_it_cannot_see(keras: Any, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("hvdx").addHandler(caplog.handler)
    try:
        callback = hvd.callbacks.MetricAverageCallback()
        callback.set_model(build(keras))
        callback.on_train_begin()
    finally:
        logging.getLogger("hvdx").removeHandler(caplog.handler)
    assert "Put it before all callbacks" in caplog.text


class FakeMetric:
    """A mean over two numbers of state, as plain arrays."""

    def __init__(self, name: str, dtype: str = "float32") -> None:
        self.name = name
        self.variables = [FakeVariable(0.0, dtype), FakeVariable(0.0, dtype)]

    def result(self) -> Any:
        total, count = (v.array for v in self.variables)
        return total / count


class FakeVariable:
    def __init__(self, value: float, dtype: str) -> None:
        self.array = np.array(value, dtype)
        self.shape, self.dtype, self.aggregation = (), self.array.dtype, "sum"

    def assign(self, value: Any) -> None:
        self.array = np.asarray(value, self.dtype)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array


def a_report(name: str, total: float, count: float, prefix: str = "", source: bool = True) -> Report:
    state = [np.array(total, "float32"), np.array(count, "float32")]
    value = np.array(total / count)
    phase = Phase([state], {"m": 0} if source else {}, {"m": value}, {"m": value})
    return Report({prefix: phase}, [(name, (((), "float32"), ((), "float32")))], [["sum", "sum"]])


def test_states_are_added() -> None:
    metric = FakeMetric("m")
    logs, partly = metric_states.merge([a_report("m", 1, 1), a_report("m", 10, 4)], [metric])
    assert logs == {"m": pytest.approx(11 / 5)}
    assert partly == {}
    assert [float(v.array) for v in metric.variables] == [0, 0]  # its own state is back


def test_without_a_source_values_are_averaged() -> None:
    logs, _ = metric_states.merge([a_report("m", 1, 1, source=False), a_report("m", 10, 4)], [FakeMetric("m")])
    assert logs == {"m": pytest.approx((1 + 2.5) / 2)}


def test_metrics_that_differ_between_ranks_are_averaged() -> None:
    logs, _ = metric_states.merge([a_report("m", 1, 1), a_report("other", 10, 4)], [FakeMetric("m")])
    assert logs == {"m": pytest.approx((1 + 2.5) / 2)}


def test_a_phase_some_ranks_lack() -> None:
    one, two = a_report("m", 1, 1, "val_"), a_report("m", 3, 2)
    logs, partly = metric_states.merge([one, two], [FakeMetric("m")])
    assert logs == {"val_m": pytest.approx(1.0), "m": pytest.approx(1.5)}
    assert partly == {"val_m": [0], "m": [1]}


def test_a_value_the_metric_does_not_give_loses_its_source() -> None:
    phase = Phase([[]], {"loss": 0}, {"loss": np.array(2.0)})
    assert phase.with_logs({"loss": 2.0}).sources == {"loss": 0}
    assert phase.with_logs({"loss": 2.5}).sources == {}
    assert phase.with_logs({"text": "x"}).logs == {}
    nan = Phase([[]], {"loss": 0}, {"loss": np.array(np.nan)})
    assert nan.with_logs({"loss": float("nan")}).sources == {"loss": 0}
