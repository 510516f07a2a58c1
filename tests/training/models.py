"""Tiny models and data for the recipes; every maker takes the module of a Keras, and the seed has been set before."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

import hvdx as hvd

STEPS, BATCH, FEATURES, OUTPUTS = 4, 6, 5, 3
VOCABULARY = 40


def linear_data(ranks: int, steps: int = STEPS) -> Any:
    """Return x and y; every rank's part has another mean, so that a rank that trains alone ends elsewhere."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, ranks, BATCH, FEATURES)).astype("float32")
    x += np.arange(ranks, dtype="float32").reshape(1, -1, 1, 1)
    y = (x[..., :OUTPUTS] * 0.5 + rng.normal(size=(steps, ranks, BATCH, OUTPUTS))).astype("float32")
    return x, y


def several_data(ranks: int) -> Any:
    """Return dictionaries of two inputs and two outputs, with sample weights whose sums differ between the ranks.

    Every Keras divides by the number of samples ("sum_over_batch_size"), not by the sum of the weights.
    """
    rng = np.random.default_rng(1)
    a, p = linear_data(ranks)
    b, q = linear_data(ranks)
    weights = [rng.uniform(0.1, 2, size=(STEPS, ranks, BATCH)).astype("float32") for _ in range(2)]
    return {"a": a, "b": b[..., ::-1].copy()}, {"p": p, "q": q + 1}, {"p": weights[0], "q": weights[1]}


def many_tokens(ranks: int) -> Any:
    """Return so many tokens that the whole embedding is fewer bytes than the rows.

    Some rows are touched in early steps only: momentum must not move them later where one process would not.
    """
    return _tokens(ranks, length=40, rows=VOCABULARY - STEPS)


def few_tokens(ranks: int) -> Any:
    """Return few tokens, some repeated and some on several ranks."""
    return _tokens(ranks, length=2, rows=8)


def _tokens(ranks: int, length: int, rows: int) -> Any:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, rows, size=(STEPS, ranks, BATCH, length))
    tokens[:, :, 0] = tokens[:, :1, :1, 0]
    tokens += np.arange(STEPS).reshape(-1, 1, 1, 1)
    y = rng.normal(size=(STEPS, ranks, BATCH, OUTPUTS)).astype("float32")
    return tokens.astype("int32"), y


def dense(keras: Any) -> Any:
    """Return two dense layers; the last computes in float32 under every policy."""
    return keras.Sequential(
        [
            keras.layers.Input((FEATURES,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(OUTPUTS, dtype="float32"),
        ]
    )


def frozen(keras: Any) -> Any:
    """Return a model whose first layer is not trained."""
    model = dense(keras)
    model.layers[0].trainable = False
    return model


def embedding(keras: Any) -> Any:
    """Return an embedding in front of a dense layer."""
    return keras.Sequential(
        [
            keras.layers.Input((None,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(OUTPUTS),
        ]
    )


def several(keras: Any) -> Any:
    """Return a model with two named inputs and two named outputs."""
    a, b = keras.layers.Input((FEATURES,), name="a"), keras.layers.Input((FEATURES,), name="b")
    both = keras.layers.Concatenate()([keras.layers.Dense(4, activation="tanh")(a), keras.layers.Dense(4)(b)])
    outputs = {name: keras.layers.Dense(OUTPUTS, name=name)(both) for name in ("p", "q")}
    return keras.Model({"a": a, "b": b}, outputs)


def lazy(keras: Any) -> Any:
    """Return a subclassed model that builds its weights when it sees its first batch."""
    return _classes(keras)[0]()


def with_apply(keras: Any) -> Any:
    """Return a model whose own train_step gives local gradients to the wrapped optimizer."""
    return _classes(keras)[1]()


def with_tape(keras: Any) -> Any:
    """Return a model whose own train_step reduces with DistributedGradientTape; its optimizer is not wrapped."""
    return _classes(keras)[2]()


@functools.cache
def _classes(keras: Any) -> tuple[Any, Any, Any]:
    class Lazy(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(8, activation="tanh")
            self.last = keras.layers.Dense(OUTPUTS)

        def call(self, inputs: Any) -> Any:
            return self.last(self.hidden(inputs))

        def loss_of(self, data: Any) -> Any:
            x, y = data
            # as every strategy asks of a loop of one's own; without one there is one replica
            return tf.reduce_mean((self(x) - y) ** 2) / tf.distribute.get_strategy().num_replicas_in_sync

    class WithApply(Lazy):
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss_of(data)
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            if hasattr(self.optimizer, "apply"):
                self.optimizer.apply(gradients, variables)
            else:
                self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return {"loss": loss}

    class WithTape(Lazy):
        distributed = True

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss_of(data)
            if self.distributed:
                tape = hvd.DistributedGradientTape(tape)
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return {"loss": loss}

    return Lazy, WithApply, WithTape
