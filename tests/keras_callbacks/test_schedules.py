"""Learning-rate rules: numbers worked out by hand, and who is in charge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdx as hvd
from keras_callbacks.schedules import (
    Window,
    in_charge,
    last_in_charge,
    multiplied,
    rate_at_step,
    warmup_multiplier,
)


def test_warmup_by_hand() -> None:
    # 4 ranks, 2 epochs of 2 steps: a quarter, half, ... in equal steps to 1
    rates = [warmup_multiplier(step / 2, 4, 2, 2) for step in range(4)]
    np.testing.assert_allclose(rates, [0.4375, 0.625, 0.8125, 1.0])
    assert warmup_multiplier(9, 4, 2, 2) == 1.0
    assert warmup_multiplier(0, 4, 0, 2) == 1.0
    assert warmup_multiplier(0.3, 1, 5, 10) == 1.0


def test_multiplied() -> None:
    assert multiplied(5, 0.5, start=3) == 0.25
    assert multiplied(3, 0.5, start=3) == 1.0
    assert multiplied(2.5, lambda epoch: 2 * epoch) == 5.0


def test_in_charge() -> None:
    windows = [Window(0, 5), Window(5, 30), Window(30, 60)]
    assert [in_charge(windows, epoch) for epoch in (0, 4, 5, 29, 30, 59, 60)] == [0, 0, 1, 1, 2, 2, None]
    assert in_charge([Window(0, 10), Window(5, None)], 7) == 1
    assert in_charge([], 3) is None
    assert [last_in_charge(windows, epoch) for epoch in (0, 60, 99)] == [None, 2, 2]
    assert last_in_charge(list(reversed(windows)), 60) == 0
    assert last_in_charge([Window(0, 0)], 0) == 0
    assert last_in_charge([Window(8, 9)], 3) is None


def test_a_warmup_that_ends_within_an_epoch_is_in_charge_of_all_of_it() -> None:
    rates = [rate_at_step(step, 0.8, 4, 1.5, 2, 0.5) for step in range(6)]
    assert rates[2:4] == [0.8, 0.8]
    assert rates[4] < 0.8


def test_rate_at_step() -> None:
    rates = [rate_at_step(step, 0.8, 4, 1, 2, 0.5) for step in range(8)]
    np.testing.assert_allclose(rates, [0.5, 0.8, 0.8, 0.8, 0.4, 0.4, 0.2, 0.2])
    smooth = rate_at_step(3, 0.8, 4, 1, 2, lambda epoch: epoch, staircase=False)
    assert smooth == pytest.approx(0.8 * 1.5)


def test_as_a_schedule_object(keras: Any) -> None:
    schedule = hvd.callbacks.warmup_schedule(0.8, 1, steps_per_epoch=2, multiplier=0.5, size=4, keras=keras)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(schedule), "mse")
    weights = []
    for _ in range(5):
        weights.append(float(model.get_weights()[0][0, 0]))
        model.train_on_batch(np.ones((1, 1)), np.array([[weights[-1] - 0.5]]))  # the gradient is 1
    rates = -np.diff([*weights, float(model.get_weights()[0][0, 0])])
    np.testing.assert_allclose(rates, [rate_at_step(s, 0.8, 4, 1, 2, 0.5) for s in range(5)], rtol=1e-4)
    again = type(schedule).from_config(schedule.get_config())
    assert float(again(3)) == pytest.approx(0.8)
    stored = keras.optimizers.deserialize(keras.optimizers.serialize(model.optimizer))
    assert stored.get_config()["learning_rate"] == model.optimizer.get_config()["learning_rate"]


def test_a_function_cannot_be_saved(keras: Any) -> None:
    schedule = hvd.callbacks.warmup_schedule(0.8, 0, steps_per_epoch=2, multiplier=lambda e: 1.0, size=4, keras=keras)
    with pytest.raises(hvd.ConfigurationError, match="cannot be saved"):
        schedule.get_config()


@pytest.mark.parametrize(
    "options", [{"initial_lr": 0}, {"initial_lr": 1.0, "steps_per_epoch": 0}, {"initial_lr": 1.0, "warmup_epochs": -1}]
)
def test_options_without_meaning(options: dict[str, Any], world: Any) -> None:
    with pytest.raises(hvd.ConfigurationError, match="Received"):
        hvd.callbacks.warmup_schedule(**{"steps_per_epoch": 2, **options})
