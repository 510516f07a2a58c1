"""XLA: an explicit request is refused with a sentence, "auto" is switched off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import keras_api
from hvdx.training import xla
from tests.training.models import dense
from tests.training.support import FAMILIES, Family, every_family, every_keras, raised_everywhere, together

pytestmark = pytest.mark.np(2)

ranks_needed = pytest.mark.np(2, plain=False)
SENTENCE = (
    "compiled by XLA (jit_compile=True), and ranks and devices cannot exchange gradients inside it. Pass "
    "jit_compile=False"
)


def _data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rank).normal(size=(8, 5)).astype("float32")
    return x, x[:, :3]


@every_family
@ranks_needed
def test_fit_with_jit_compile_is_refused(world: Any, family: Family) -> None:
    model = dense(family.keras)
    before = model.get_weights()
    model.compile(hvd.DistributedOptimizer(family.optimizers.SGD(0.1)), "mse", jit_compile=True)
    messages = raised_everywhere(world.XlaError, lambda: model.fit(*_data(world.rank()), batch_size=4, verbose=0))
    assert all(SENTENCE in message for message in messages)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))


@every_keras
@pytest.mark.parametrize("by", ["tape", "optimizer"])
@ranks_needed
def test_a_compiled_loop_is_refused(world: Any, family: Family, by: str) -> None:
    w = tf.Variable([1.0, 2.0])
    optimizer = family.optimizers.SGD(0.1)
    optimizer.build([w])
    if by == "optimizer":
        hvd.DistributedOptimizer(optimizer)

    @tf.function(jit_compile=True)
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * w)
        own = hvd.DistributedGradientTape(tape) if by == "tape" else tape
        optimizer.apply_gradients([(own.gradient(loss, w), w)])

    messages = raised_everywhere(world.XlaError, step)
    assert all(SENTENCE in message for message in messages)


@every_keras
def test_a_function_compiled_inside_the_step_is_fine(world: Any, family: Family) -> None:
    """What the ranks exchange lies outside of it."""

    @tf.function(jit_compile=True)
    def forward(x: Any, w: Any) -> Any:
        return tf.reduce_sum((x * w) ** 2)

    w = tf.Variable(2.0)

    @tf.function
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = forward(x, w)
        return hvd.DistributedGradientTape(tape).gradient(loss, w)

    result = together(lambda: gradient(tf.constant([1.0 + world.rank()])))
    assert float(result) == np.mean([4 * (1 + r) ** 2 for r in range(world.size())])


def test_automatic_compilation_works(world: Any) -> None:
    for family in FAMILIES:
        model = dense(family.keras)
        options = {"jit_compile": "auto"} if family.keras_name == "keras3" else {}
        model.compile(hvd.DistributedOptimizer(family.optimizers.SGD(0.1)), "mse", **options)
        together(lambda model=model: model.fit(*_data(world.rank()), batch_size=4, verbose=0))
        assert not getattr(model, "jit_compile", False)


def test_automatic_means_off_where_keras_would_choose_xla(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras chooses it where it sees a GPU."""

    class Trainer:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def _resolve_auto_jit_compile(self) -> bool:
            return True

    monkeypatch.setattr(keras_api, "trainer_class_of_keras_3", lambda: Trainer)
    xla.switch_auto_off()
    xla.switch_auto_off()
    make = FAMILIES[0].optimizers.SGD
    assert Trainer(make(0.1))._resolve_auto_jit_compile() is True
    assert Trainer(hvd.DistributedOptimizer(make(0.1)))._resolve_auto_jit_compile() is (world.size() == 1)
    scaled = FAMILIES[0].loss_scale(hvd.DistributedOptimizer(make(0.1)))
    assert Trainer(scaled)._resolve_auto_jit_compile() is (world.size() == 1)
