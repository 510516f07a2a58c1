"""The table of the yardstick: each recipe is a model, an optimizer, data and a way to train, for any Keras."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tests.training.models import (
    dense,
    embedding,
    few_tokens,
    frozen,
    lazy,
    linear_data,
    many_tokens,
    several,
    several_data,
    with_apply,
    with_tape,
)
from tests.training.support import FAMILIES, KERAS_3, LEGACY, Family

ALL = FAMILIES + LEGACY

Wrap = Callable[[Any], Any]


def fit(model: Any, data: Any, batch: int) -> None:
    """Train one epoch in the given order."""
    x, y, *weights = data
    model.fit(x, y, batch, epochs=1, verbose=0, shuffle=False, sample_weight=weights[0] if weights else None)


def train_on_batches(model: Any, data: Any, batch: int) -> None:
    """Train by `train_on_batch`."""
    x, y = data
    for start in range(0, len(x), batch):
        model.train_on_batch(x[start : start + batch], y[start : start + batch])


@dataclass(frozen=True)
class Recipe:
    """One row of the table.

    Args:
        name: of the test.
        optimizer: makes the optimizer of a family; `wrap` is what hvdx does with it, or nothing in the reference.
        model: makes the model.
        data: arrays [steps, ranks, batch, ...] for a number of ranks.
        train: trains a compiled model on data with batches of a size.
        families: for which optimizers it makes sense.
        compile: further arguments of `model.compile`.
        policy: the global dtype policy.
        wrapped: options of `hvd.DistributedOptimizer`.
        reference: what is done to the optimizer of the reference run.
        seeds_differ: whether the ranks build different weights, which `broadcast_variables` makes equal.
        by_tape: whether the model reduces by itself, so that the optimizer is left alone.
        collectives: how many run in the whole training on more than one rank; a second number is that of Keras 3.
        rtol, atol: of the comparison with one process; batches of another size are summed in another order.
    """

    name: str
    optimizer: Callable[[Family, Wrap], Any]
    model: Callable[[Any], Any] = dense
    data: Callable[[int], Any] = linear_data
    train: Callable[[Any, Any, int], None] = fit
    families: list[Family] = field(default_factory=lambda: ALL)
    compile: dict[str, Any] = field(default_factory=lambda: {"loss": "mse"})
    policy: str | None = None
    wrapped: dict[str, Any] = field(default_factory=dict)
    reference: Wrap = lambda optimizer: optimizer
    seeds_differ: bool = False
    by_tape: bool = False
    collectives: tuple[int, ...] = (4,)
    rtol: float = 1e-5
    atol: float = 1e-6


def sgd(**options: Any) -> Callable[[Family, Wrap], Any]:
    """Return a maker of SGD."""
    return lambda family, wrap: wrap(family.optimizers.SGD(0.1, **options))


def adam(**options: Any) -> Callable[[Family, Wrap], Any]:
    """Return a maker of Adam; its epsilon is so large that a gradient near zero is not blown up to a full step."""
    return lambda family, wrap: wrap(family.optimizers.Adam(0.01, epsilon=1e-3, **options))


def with_dense_gradients(optimizer: Any) -> Any:
    """Make an optimizer of Keras 3 densify sparse gradients.

    Its Adam squares the values of IndexedSlices before the duplicates are summed, so stock Keras is inexact there: an
    embedding trains differently than the same numbers as a dense layer. hvdx sums duplicates first.
    """
    if not hasattr(optimizer, "apply"):
        return optimizer
    apply = optimizer.apply
    optimizer.__dict__["apply"] = lambda gradients, variables=None: apply(
        [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients], variables
    )
    return optimizer


def _schedule(family: Family, wrap: Wrap) -> Any:
    decay = family.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return wrap(family.optimizers.SGD(decay))


def _scaled_outside(family: Family, wrap: Wrap) -> Any:
    return family.loss_scale(wrap(family.optimizers.SGD(0.1)))


def _scaled_inside(family: Family, wrap: Wrap) -> Any:
    return wrap(family.loss_scale(family.optimizers.SGD(0.1)))


def _with_an_inf(ranks: int) -> Any:
    """The data of `linear_data`, but for an infinity in the last rank's third batch."""
    x, y = linear_data(ranks)
    x = x.copy()
    x[2, -1, 0, 0] = np.inf
    return x, y


def _accumulated(micro_batches: int) -> Callable[[int], Any]:
    return lambda ranks: linear_data(ranks, steps=4 * micro_batches)


def _build_with(**options: Any) -> dict[str, Any]:
    return {"loss": "mse", **options}


NEW = FAMILIES
# The gradients of 16-bit layers are 16-bit sums over the batch before anything of hvdx sees them; one process rounds
# the sum over the union, two ranks round the sums over the halves. 3 and 8 bits of rounding then go through 4 updates.
FP16 = {"rtol": 2e-3, "atol": 1e-3}
BF16 = {"rtol": 2e-2, "atol": 1e-2}

RECIPES = [
    Recipe("sgd", sgd()),
    Recipe("momentum", sgd(momentum=0.9)),
    Recipe("adam", adam()),
    Recipe("clipnorm", sgd(clipnorm=0.05)),
    Recipe("clipvalue", sgd(clipvalue=0.02)),
    Recipe("global_clipnorm", sgd(global_clipnorm=0.05)),
    Recipe("accumulation", sgd(gradient_accumulation_steps=3), data=_accumulated(3), families=KERAS_3),
    Recipe(
        "accumulation-eager",
        sgd(gradient_accumulation_steps=2, global_clipnorm=0.05),
        data=_accumulated(2),
        families=KERAS_3,
        compile=_build_with(run_eagerly=True),
    ),
    Recipe(
        "accumulation-4-steps-per-execution",
        adam(gradient_accumulation_steps=2),
        data=_accumulated(2),
        families=KERAS_3,
        compile=_build_with(steps_per_execution=4),
    ),
    Recipe("ema", sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2), families=NEW),
    Recipe("weight-decay", sgd(weight_decay=0.1), families=NEW),
    Recipe("schedule", _schedule),
    Recipe("loss-scale-outside", _scaled_outside, data=_with_an_inf, collectives=(4, 7)),
    Recipe("loss-scale-inside", _scaled_inside, data=_with_an_inf, collectives=(4, 7)),
    Recipe("mixed_bfloat16", sgd(), policy="mixed_bfloat16", **BF16),
    Recipe("mixed_float16", sgd(), policy="mixed_float16", collectives=(4, 8), **FP16),
    Recipe("frozen", sgd(), frozen),
    Recipe("subclassed", sgd(), lazy),
    Recipe("subclassed-broadcast", sgd(), lazy, seeds_differ=True, collectives=(5,)),
    Recipe("steps_per_execution", sgd(), compile=_build_with(steps_per_execution=4)),
    Recipe("run_eagerly", sgd(global_clipnorm=0.05), compile=_build_with(run_eagerly=True)),
    Recipe("train_on_batch", sgd(), train=train_on_batches),
    Recipe("train_step-apply", sgd(), with_apply, compile={}),
    Recipe("train_step-tape", sgd(), with_tape, compile={}, by_tape=True),
    Recipe("several-inputs-and-outputs", sgd(), several, several_data, compile={"loss": {"p": "mse", "q": "mae"}}),
]

# In Keras 3 loss scaling tests for infinities in an exchange of its own, and reduces only where there are none.
# An update with an embedding: one exchange for the dense gradients; then one for the dense embedding, or two gathers;
# "auto" first agrees on the number of rows.
RECIPES += [
    Recipe("embedding-dense", sgd(), embedding, many_tokens, wrapped={"sparse_as_dense": True}),
    Recipe("embedding-rows", sgd(), embedding, many_tokens, wrapped={"sparse_as_dense": False}, collectives=(12,)),
    Recipe("embedding-auto-dense", sgd(), embedding, many_tokens, collectives=(12,)),
    Recipe("embedding-auto-rows", sgd(), embedding, few_tokens, collectives=(16,)),
    Recipe("embedding-momentum-rows", sgd(momentum=0.9), embedding, few_tokens, collectives=(16,)),
    Recipe("embedding-momentum-dense", sgd(momentum=0.9), embedding, many_tokens, collectives=(12,)),
    Recipe("embedding-adam", adam(), embedding, many_tokens, collectives=(12,), reference=with_dense_gradients),
]
