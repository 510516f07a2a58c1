"""Warm-up and schedules in `fit`: the same rates on every rank, after a resume too; momentum that follows the rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdx as hvd
from hvdx import keras_api
from hvdx.ops.convert import to_tensor
from keras_callbacks.base import Callback
from keras_callbacks.schedules import warmup_multiplier

pytestmark = pytest.mark.np(2)
STEPS, RATE = 3, 0.4


class Rates(Callback):
    """Records the rate with which each step is made."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(keras_api.learning_rate(self.model.optimizer))


def model_of(optimizer: Any, keras: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    return model


def fit(keras: Any, callbacks: list[Any], epochs: int, initial_epoch: int = 0, steps: int = STEPS) -> tuple[Any, Any]:
    model = model_of(keras.optimizers.SGD(RATE), keras)
    x = np.ones((2 * steps, 2), "float32") * (1 + hvd.rank())
    rates = Rates()
    history = model.fit(
        x, x[:, :1], batch_size=2, epochs=epochs, initial_epoch=initial_epoch, verbose=0, callbacks=[*callbacks, rates]
    ).history
    return rates.rates, history[keras_api.rate_name(model)]


def recipe() -> list[Any]:
    """Horovod's usual one: warm-up, full rate, then steps down."""
    return [
        hvd.callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(RATE, multiplier=1.0, start_epoch=2, end_epoch=3),
        hvd.callbacks.LearningRateScheduleCallback(RATE, multiplier=lambda e: 0.1, start_epoch=3, end_epoch=4),
        hvd.callbacks.LearningRateScheduleCallback(
            RATE, multiplier=lambda e: 0.01 * (1 + e), start_epoch=4, end_epoch=5, staircase=False
        ),
    ]


@pytest.mark.parametrize("backwards", [False, True])
def test_every_step_has_the_rate_of_the_rule(keras: Any, backwards: bool) -> None:
    order = -1 if backwards else 1
    rates, logged = fit(keras, recipe()[::order], 6)
    want = [RATE * warmup_multiplier(step / STEPS, hvd.size(), 2, STEPS) for step in range(2 * STEPS)]
    want += [RATE] * STEPS + [RATE * 0.1] * STEPS
    want += [RATE * 0.01 * (5 + step / STEPS) for step in range(STEPS)]
    want += [want[-1]] * STEPS  # nobody is in charge any more
    everyone = hvd.allgather_object(rates)
    np.testing.assert_allclose(rates, want, rtol=1e-6)
    np.testing.assert_allclose(logged, want[STEPS - 1 :: STEPS], rtol=1e-6)
    assert all(other == rates for other in everyone)
    for start in (1, 3, 4, 5):
        resumed, _ = fit(keras, recipe()[::order], 6, start)
        np.testing.assert_allclose(resumed, want[start * STEPS :], rtol=1e-6)


def test_ranks_with_different_numbers_of_steps_have_one_rate(keras: Any) -> None:
    warmup = hvd.callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=1)
    warmup.set_model(model_of(keras.optimizers.SGD(RATE), keras))
    warmup.set_params({"steps": 4 + hvd.rank()})
    warmup.on_train_begin()
    assert warmup.rate(0.5) == RATE * warmup_multiplier(0.5, hvd.size(), 1, 3 + hvd.size())


def test_unknown_number_of_steps(keras: Any) -> None:
    warmup = hvd.callbacks.LearningRateWarmupCallback(RATE)
    warmup.set_model(model_of(keras.optimizers.SGD(RATE), keras))
    warmup.set_params({"steps": None if hvd.rank() == 0 else 4})
    with pytest.raises(hvd.ConfigurationError, match="Pass steps_per_epoch"):
        warmup.on_train_begin()


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_by_hand(keras: Any, nesterov: bool) -> None:
    """With the rate outside the velocity, u = m u + g and w -= rate u, a change of the rate needs no correction.

    Goyal et al. 2017, section 2.1: Keras has the rate inside, and the correction makes both the same.
    """
    kinds = [keras.optimizers.SGD]
    if keras.__version__ < "3":
        kinds.append(keras.optimizers.legacy.SGD)
    x = np.array([[1.0, -2.0]], "float32")
    for kind in kinds:
        model = model_of(kind(0.1, momentum=0.9, nesterov=nesterov), keras)
        weights = model.get_weights()[0].astype("float64")
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: [1.0, 0.1, 3.0, 0.5][int(epoch)])
        model.fit(x, np.zeros((1, 1)), epochs=4, verbose=0, callbacks=[schedule])
        u = np.zeros_like(weights)
        for factor in (1.0, 0.1, 3.0, 0.5):
            gradient = 2 * (x @ weights) * x.T
            u = 0.9 * u + gradient
            weights = weights - 0.1 * factor * (0.9 * u + gradient if nesterov else u)
        np.testing.assert_allclose(model.get_weights()[0], weights, rtol=1e-4)


def test_without_momentum_correction(keras: Any) -> None:
    x = np.array([[1.0, -2.0]], "float32")
    for corrected in (False, True):
        model = model_of(keras.optimizers.SGD(0.1, momentum=0.9), keras)
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, momentum_correction=corrected)
        model.fit(x, np.zeros((1, 1)), epochs=1, verbose=0, callbacks=[schedule])
        [velocity] = [np.array(to_tensor(v)) for v in keras_api.velocities(model.optimizer)]
        schedule.on_epoch_begin(1)
        [after] = [np.array(to_tensor(v)) for v in keras_api.velocities(model.optimizer)]
        np.testing.assert_allclose(after, velocity * (0.5 if corrected else 1.0), rtol=1e-6)


def test_which_optimizers_have_the_rate_in_their_velocity(keras: Any) -> None:
    made = {
        "SGD": (keras.optimizers.SGD(0.1, momentum=0.9), 1),
        "RMSprop": (keras.optimizers.RMSprop(0.1, momentum=0.9), 1),
        "plain SGD": (keras.optimizers.SGD(0.1), 0),
        "Adam": (keras.optimizers.Adam(0.1), 0),
    }
    for name, (optimizer, count) in made.items():
        model = model_of(optimizer, keras)
        keras_api.build_optimizer(optimizer, model.trainable_variables)
        assert len(keras_api.velocities(optimizer)) == count, name


def test_a_schedule_object_is_refused(keras: Any) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model = model_of(keras.optimizers.SGD(schedule), keras)
    with pytest.raises(hvd.OptimizerError, match="is a LearningRateSchedule"):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0,
                  callbacks=[hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)])  # fmt: skip


def test_verbose(keras: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fit(keras, [hvd.callbacks.LearningRateWarmupCallback(RATE, 1, verbose=1)], 2)
    out = capsys.readouterr().out
    assert out.count("Epoch 1: the warm-up of the learning rate is over, at 0.4.") == (1 if hvd.rank() == 0 else 0)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (hvd.callbacks.LearningRateWarmupCallback, {"initial_lr": 0}),
        (hvd.callbacks.LearningRateWarmupCallback, {"initial_lr": None}),
        (hvd.callbacks.LearningRateWarmupCallback, {"initial_lr": 1.0, "warmup_epochs": -1}),
        (hvd.callbacks.LearningRateScheduleCallback, {"initial_lr": 1.0, "multiplier": "x"}),
        (hvd.callbacks.LearningRateScheduleCallback, {"initial_lr": 1.0, "multiplier": 1.0, "steps_per_epoch": 0}),
    ],
)
def test_options_without_meaning(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(hvd.ConfigurationError, match="Received"):
        make(**options)


def test_an_end_before_the_start() -> None:
    with pytest.raises(hvd.ConfigurationError, match="comes before"):
        hvd.callbacks.LearningRateScheduleCallback(1.0, 1.0, start_epoch=4, end_epoch=3)
