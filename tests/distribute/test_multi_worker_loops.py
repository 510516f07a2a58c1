"""Loops of one's own under the `multi_worker` strategy: one process's numbers, and how often gradients travel."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.comm import first_batch
from hvdx.distribute import strategy
from tests.training.models import BATCH, linear_data
from tests.training.support import (
    KERAS_3,
    Family,
    arrays,
    assert_equal_everywhere,
    assert_same_bits,
    counting,
    every_family,
    together,
    union,
)

pytestmark = pytest.mark.np(2, 3)


@every_family
@pytest.mark.parametrize("how", ["bare", "wrapped"])
def test_own_loop_equals_one_process(world: Any, family: Family, how: str) -> None:
    # in each further step: whether any rank still has rows, and the gradients, once; then the rows have ended
    _check(world, family, how, 2 * 3 + 1)


@pytest.mark.parametrize("family", KERAS_3, ids=str)
@pytest.mark.parametrize(
    ("how", "collectives"),
    [
        ("tape", 2 * 3 + 1),
        ("tape-wrapped", 2 * 3 + 1),
        ("tape-scaled", 3 * 3 + 1),  # whether all gradients of all ranks are finite
        ("tape-changed", 3 * 3 + 1),  # the ranks may have changed them differently
        ("tape-accumulated", 2 * 3 + 1 + 2),  # the passes before may have had another tape
    ],
)
def test_gradients_of_a_distributed_tape_travel_once(
    world: Any, family: Family, how: str, collectives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(first_batch, "_warned", said)
    _check(world, family, how, collectives)
    assert said == []  # that the ranks read the same data, where gradients that are equal already travel again


def _check(world: Any, family: Family, how: str, expected: int) -> None:
    data = union(linear_data(world.size()))
    batch = BATCH * world.size()
    assert len(data[0]) == 4 * batch
    reference, _ = _own_loop(family, None, data, batch, how)
    model, collectives = together(lambda: _own_loop(family, strategy("multi_worker"), data, batch, how))
    assert_same_bits(arrays(model.weights), "weights")
    assert_equal_everywhere(arrays(model.weights), arrays(reference.weights), 1e-5, 1e-6)
    if world.size() > 1:
        assert collectives == expected


def _own_loop(family: Family, made: Any, data: Any, batch: int, how: str) -> tuple[Any, int]:
    keras = family.keras
    keras.utils.set_random_seed(5)
    options = {"gradient_accumulation_steps": 2} if how == "tape-accumulated" else {}

    def build() -> Any:
        model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
        model.build((None, data[0].shape[-1]))
        model.optimizer = family.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05, **options)
        if "wrapped" in how and made is not None:
            model.optimizer = hvd.DistributedOptimizer(model.optimizer)
        if how == "tape-scaled":
            model.optimizer = family.loss_scale(model.optimizer)
        return model

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / (batch * y.shape[-1])
            if how == "tape-scaled":
                loss = model.optimizer.scale_loss(loss)
        variables = model.trainable_variables
        if "tape" in how and made is not None:
            tape = hvd.DistributedGradientTape(tape)
        # in another order than the optimizer's, so that an exchange there would be another one than the tape's
        gradients = tape.gradient(loss, variables[::-1])[::-1]
        if how == "tape-changed":
            gradients = [tf.clip_by_value(gradient, -1e3, 1e3) for gradient in gradients]
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    dataset = tf.data.Dataset.from_tensor_slices(data).batch(batch)
    if made is None:
        model = build()
        run = tf.function(step)
        for x, y in dataset:
            run(x, y)
        return model, 0
    with made.scope():
        model = build()
    run = tf.function(lambda x, y: made.run(step, args=(x, y)))
    batches = iter(made.experimental_distribute_dataset(dataset))
    run(*next(batches))
    with counting() as collectives:
        for x, y in batches:
            run(x, y)
    return model, collectives[0]
