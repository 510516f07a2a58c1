"""The warning before the first step that all ranks train on the same data: what it looks at, what it leaves alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.comm import first_batch

pytestmark = pytest.mark.np(2, plain=False)

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = (X @ np.ones((4, 1), "float32")).astype("float32")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was said of the ranks' data, filled while the test runs."""
    monkeypatch.setattr(first_batch, "_warned", messages := [])
    with caplog.at_level(logging.WARNING, "hvdx"):
        yield messages


def dropout_model(keras: Any, **options: Any) -> Any:
    """A model whose first gradients differ between ranks although its batches do not."""
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", **options)
    return model


def fit(model: Any, *data: Any, **options: Any) -> Any:
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback()]
    return model.fit(*data, callbacks=callbacks, verbose=0, **options)


def test_the_same_arrays_in_another_order(world: Any, keras: Any, said: list[str]) -> None:
    keras.utils.set_random_seed(world.rank() + 1)
    fit(dropout_model(keras), X, Y, batch_size=4)
    assert len(said) == 1
    assert "SAME arrays on all 2 ranks" in said[0]
    assert "hvd.shard(...)" in said[0]


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 3}, {"run_eagerly": True}], ids=str)
def test_the_same_first_batch(world: Any, keras: Any, said: list[str], options: dict[str, Any]) -> None:
    """Of a dataset, which ends in a smaller batch; all its batches are trained on, and nothing is traced twice."""
    model, seen = dropout_model(keras, **options), []
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    data = data.map(lambda x, y: (tf.numpy_function(lambda v: seen.append(len(v)) or v, [x], tf.float32), y))
    data = data.map(lambda x, y: (tf.ensure_shape(x, [None, 4]), y))
    history = fit(model, data)
    assert len(said) == 1
    assert "SAME first batch" in said[0]
    assert sum(seen) == 32
    assert len(history.history["loss"]) == 1
    assert int(model.optimizer.iterations) == 7


def test_the_same_words(world: Any, keras: Any, said: list[str]) -> None:
    words = keras.layers.Input((1,), dtype="string")
    model = keras.Sequential([words, keras.layers.Lambda(lengths), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", run_eagerly=True)
    fit(model, tf.data.Dataset.from_tensor_slices(([["ring"], ["tree"]], [[1.0], [0.0]])).batch(2))
    assert "SAME first batch" in said[0]


def lengths(words: Any) -> Any:
    return tf.cast(tf.strings.length(words), tf.float32)


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_nothing_is_said_of_different_data(world: Any, keras: Any, said: list[str], kind: str) -> None:
    mine = (X[world.rank() :: 2], Y[world.rank() :: 2])
    data = mine if kind == "arrays" else (tf.data.Dataset.from_tensor_slices(mine).batch(4),)
    fit(dropout_model(keras), *data)
    assert said == []


def test_nothing_is_said_of_zeros(world: Any, keras: Any, said: list[str]) -> None:
    """Equal bits that mean nothing."""
    fit(dropout_model(keras), np.zeros_like(X), np.zeros_like(Y))
    assert said == []
