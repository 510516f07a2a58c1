"""CheckpointCallback: the same script goes on where it was, on all ranks; errors reach all ranks, and nothing hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdx as hvd
from hvdx import keras_api
from hvdx.ops.convert import to_tensor
from keras_callbacks.checkpoint import difference

# Each rank has a tmp_path of its own, so only rank 0 ever sees the files.
pytestmark = pytest.mark.np(2)

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = (X @ np.ones((4, 1), "float32")).astype("float32")
EPOCHS = 4


def build(keras: Any, optimizer: str = "adam", lazily: bool = False, units: int = 3) -> Any:
    keras.utils.set_random_seed(1 + hvd.rank())
    first = [] if lazily else [keras.layers.Input((4,))]
    model = keras.Sequential([*first, keras.layers.Dense(units), keras.layers.Dense(1)])
    inner = {
        "adam": lambda: keras.optimizers.Adam(0.01),
        "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
        "legacy": lambda: keras.optimizers.legacy.Adam(0.01),
        "scaled": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    }[optimizer]()
    wrapped = hvd.DistributedOptimizer(inner)
    if optimizer == "scaled":
        wrapped = keras.mixed_precision.LossScaleOptimizer(wrapped, initial_scale=64.0, dynamic_growth_steps=3)
    model.compile(wrapped, "mse")
    return model


class Dead(Exception):
    """What stands for the end of the process."""


def dies_in(keras: Any, epoch: int) -> Any:
    class Dies(keras.callbacks.Callback):
        def on_epoch_begin(self, current: int, logs: Any = None) -> None:
            if current == epoch:
                raise Dead

    return Dies()


def fit(keras: Any, model: Any, directory: Path, *more: Any, epochs: int = EPOCHS, **options: Any) -> Any:
    x, y = X[hvd.rank() :: hvd.size()], Y[hvd.rank() :: hvd.size()]
    callbacks = [
        hvd.callbacks.CheckpointCallback(directory, **options),
        hvd.callbacks.BroadcastGlobalVariablesCallback(),
        hvd.callbacks.MetricAverageCallback(),
        *more,
    ]
    return model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)


def state(model: Any) -> list[np.ndarray]:
    variables = [*model.weights, *keras_api.optimizer_variables(model.optimizer)]
    return [np.array(to_tensor(v)) for v in variables]


def gathered(*values: Any) -> list[Any]:
    return hvd.allgather_object(values)


def kinds(keras: Any) -> list[str]:
    return ["adam", "sgd", "scaled"] + (["legacy"] if keras.__version__ < "3" else [])


@pytest.mark.parametrize("kind", ["adam", "scaled", "legacy"])
@pytest.mark.parametrize("lazily", [False, True])
def test_a_resumed_training_equals_one_that_was_not_interrupted(
    keras: Any, tmp_path: Path, kind: str, lazily: bool
) -> None:
    if kind not in kinds(keras):
        pytest.skip("Keras 3 has no legacy optimizers")
    whole = build(keras, kind, lazily)
    expected = fit(keras, whole, tmp_path / "whole").history["loss"]
    with pytest.raises(Dead):
        fit(keras, build(keras, kind, lazily), tmp_path / "cut", dies_in(keras, 2))
    model = build(keras, kind, lazily)
    history = fit(keras, model, tmp_path / "cut")
    everyone = gathered([a.tobytes() for a in state(model)], history.epoch, os.listdir(tmp_path))
    assert history.epoch == [2, 3]
    np.testing.assert_allclose(history.history["loss"], expected[2:], rtol=1e-6)
    for got, want in zip(state(model), state(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    assert all(weights == everyone[0][0] for weights, _, _ in everyone)
    assert all(files == [] for _, _, files in everyone[1:])  # the other ranks neither wrote nor read


def test_a_second_fit_is_not_affected(keras: Any, tmp_path: Path) -> None:
    fit(keras, build(keras), tmp_path, epochs=2)
    model = build(keras)
    assert fit(keras, model, tmp_path, epochs=3).epoch == [2]
    x = X[hvd.rank() :: hvd.size()]
    assert model.fit(x, x[:, :1], epochs=1, verbose=0).epoch == [0]


def test_a_finished_training_ends_at_once(keras: Any, tmp_path: Path) -> None:
    first = build(keras)
    fit(keras, first, tmp_path)
    again = build(keras)
    history = fit(keras, again, tmp_path)
    assert history.epoch == []
    for got, want in zip(state(again), state(first), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(hvd.CheckpointError, match="Call the model on one batch before fit"):
        fit(keras, build(keras, lazily=True), tmp_path)


def test_keeps_the_newest(keras: Any, tmp_path: Path) -> None:
    fit(keras, build(keras), tmp_path / "two", keep=2)
    fit(keras, build(keras), tmp_path / "every", save_freq=3)
    if hvd.rank() == 0:
        assert sorted(os.listdir(tmp_path / "two")) == ["epoch-00003.npz", "epoch-00004.npz"]
        assert sorted(os.listdir(tmp_path / "every")) == ["epoch-00003.npz", "epoch-00004.npz"]


def test_readable_right_after_the_epoch(keras: Any, tmp_path: Path) -> None:
    shared = Path(hvd.broadcast_object(str(tmp_path)))
    seen: list[bool] = []

    class Looks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch:
                seen.append((shared / f"epoch-{epoch:05d}.npz").exists())

    fit(keras, build(keras), shared, Looks())
    assert seen == [True] * (EPOCHS - 1)


def test_it_has_what_later_callbacks_of_the_epoch_decide(keras: Any, tmp_path: Path) -> None:
    class Halves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            optimizer = self.model.optimizer
            keras_api.set_learning_rate(optimizer, keras_api.learning_rate(optimizer) / 2)

    fit(keras, build(keras), tmp_path, Halves(), epochs=2)
    model = build(keras)
    fit(keras, model, tmp_path, epochs=2)
    assert keras_api.learning_rate(model.optimizer) == pytest.approx(0.01 / 4)


@pytest.mark.parametrize("lazily", [False, True])
def test_rates_of_a_schedule_after_a_resume(keras: Any, tmp_path: Path, lazily: bool) -> None:
    def more() -> list[Any]:
        return [
            hvd.callbacks.LearningRateWarmupCallback(0.01 * hvd.size(), warmup_epochs=1),
            hvd.callbacks.LearningRateScheduleCallback(0.01 * hvd.size(), 0.5, start_epoch=1),
        ]

    whole = build(keras, "sgd", lazily)
    rates = fit(keras, whole, tmp_path / "whole", *more()).history[keras_api.rate_name(whole)]
    with pytest.raises(Dead):
        fit(keras, build(keras, "sgd", lazily), tmp_path / "cut", *more(), dies_in(keras, 2))
    model = build(keras, "sgd", lazily)
    resumed = fit(keras, model, tmp_path / "cut", *more()).history[keras_api.rate_name(model)]
    np.testing.assert_allclose(resumed, rates[2:], rtol=1e-6)
    for got, want in zip(state(model), state(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_another_model_is_refused_on_every_rank(keras: Any, tmp_path: Path) -> None:
    fit(keras, build(keras), tmp_path, epochs=1)
    names = os.listdir(tmp_path)
    other = build(keras, units=5)
    before = [w.copy() for w in other.get_weights()]
    with pytest.raises(hvd.CheckpointError, match=r"kernel(:0)? 4x3 float32 where the model has .*kernel(:0)? 4x5"):
        fit(keras, other, tmp_path)
    for got, want in zip(other.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(hvd.CheckpointError, match="is not one of this model and optimizer"):
        fit(keras, build(keras, "sgd"), tmp_path)
    assert os.listdir(tmp_path) == names


def test_damage_is_passed_over(keras: Any, tmp_path: Path) -> None:
    fit(keras, build(keras), tmp_path)
    if hvd.rank() == 0:
        newest = tmp_path / "epoch-00004.npz"
        newest.write_bytes(newest.read_bytes()[:-100])
    assert fit(keras, build(keras), tmp_path).epoch == [3]
    if hvd.rank() == 0:
        for path in tmp_path.iterdir():
            path.write_bytes(b"damaged")
    with pytest.raises(hvd.CheckpointError, match="Move them away"):
        fit(keras, build(keras), tmp_path)


def test_an_unusable_directory_is_an_error_on_every_rank(keras: Any, tmp_path: Path) -> None:
    if hvd.rank() == 0:
        (tmp_path / "file").write_text("")
    with pytest.raises(hvd.CheckpointError, match="Rank 0 cannot use the checkpoint directory"):
        fit(keras, build(keras), tmp_path / "file" / "below")


def test_a_write_that_fails_is_an_error_on_every_rank(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    if hvd.rank() == 0:
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(hvd.CheckpointError, match="No space left on device"):
        fit(keras, build(keras), tmp_path)
    if hvd.rank() == 0:
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": True}, {"save_freq": 0}, {"save_freq": "batch"}])
def test_options_without_meaning(options: dict[str, Any]) -> None:
    with pytest.raises(hvd.ConfigurationError, match="Received"):
        hvd.callbacks.CheckpointCallback("somewhere", **options)


def test_difference() -> None:
    def table(*rows: tuple[str, list[int], str]) -> dict[str, Any]:
        names, shapes, dtypes = zip(*rows, strict=True)
        return {"names": names, "shapes": shapes, "dtypes": dtypes}

    one = table(("a/kernel", [2, 3], "float32"), ("a/bias", [3], "float32"))
    assert difference(one, table(("a_7/kernel", [2, 3], "float32"), ("a_7/bias", [3], "float32"))) is None
    assert "a/bias 3 float32 where the model has a/bias 3 float16" in str(
        difference(one, table(("a/kernel", [2, 3], "float32"), ("a/bias", [3], "float16")))
    )
    longer = table(("a/kernel", [2, 3], "float32"), ("a/bias", [3], "float32"), ("b", [], "int64"))
    assert "the first that only the model has is b" in str(difference(one, longer))
    assert "the first that only the checkpoint has is b" in str(difference(longer, one))
