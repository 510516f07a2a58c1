"""The yardstick's recipes through parameter servers, compared with one process that trains on the union of batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.distribute.parameter_server import ParameterServerOptimizer
from hvdx.keras_api import inner_optimizer
from tests.distribute.parameter_server_workers import Worker
from tests.training.models import BATCH
from tests.training.recipes import RECIPES, Recipe, Wrap, adam, sgd
from tests.training.support import FAMILIES, Family, arrays, optimizer_arrays, part, policy, union

PIECE_BYTES = 48
"""So small that most variables of the tiny models are cut in pieces."""


def _excluding(family: Family, wrap: Wrap) -> Any:
    optimizer = family.optimizers.AdamW(0.01, weight_decay=0.3, epsilon=1e-3)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return wrap(optimizer)


def _set_rate(model: Any, data: Any, batch: int) -> None:
    keras = type(model).__module__.split(".")[0]
    callbacks = __import__(keras).callbacks
    model.fit(
        *data, batch, epochs=2, verbose=0, shuffle=False,
        callbacks=[callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1))],
    )  # fmt: skip


def _constrained(keras: Any) -> Any:
    rule = keras.constraints.MaxNorm(0.5)
    layers = keras.layers
    return keras.Sequential([layers.Input((5,)), layers.Dense(8, kernel_constraint=rule), layers.Dense(3)])


def _two_fits(model: Any, data: Any, batch: int) -> None:
    for _ in range(2):
        model.fit(*data, batch, epochs=1, verbose=0, shuffle=False)


_LEFT_OUT = {"train_step-tape", "accumulation-4-steps-per-execution", "embedding-rows", "embedding-auto-rows"}
"""What does not reduce in the optimizer, or differs from another recipe only in what servers do not have."""

_FEW = {"adam", "global_clipnorm", "accumulation", "loss-scale-inside", "embedding-momentum-rows"}

OWN = [
    Recipe("adamw-excluding", _excluding),
    Recipe("rate-set-by-callback", sgd(momentum=0.9), train=_set_rate),
    Recipe("constraint", sgd(), _constrained),
    Recipe("ema-two-fits", adam(use_ema=True, ema_momentum=0.7), train=_two_fits),
    Recipe("accumulation-adam-ema", adam(use_ema=True, gradient_accumulation_steps=2), families=FAMILIES[:1]),
]


def cases(few: bool = False) -> list[tuple[Recipe, Family]]:
    """Return every recipe with every Keras whose optimizers the servers run.

    Args:
        few: for the client without the strategy around it, with which all recipes are run.
    """
    kept = [recipe for recipe in [*RECIPES, *OWN] if recipe.name not in _LEFT_OUT and (not few or recipe.name in _FEW)]
    found = [(recipe, family) for recipe in kept for family in recipe.families if not family.legacy]
    return [(r, f) for r, f in found if r.name != "accumulation-adam-ema" or f.keras_name == "keras3"]


def classes(family: Family) -> list[str]:
    """Return the names of a Keras's optimizers that the servers run."""
    optimizers = family.optimizers
    no = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer"}
    return sorted(
        n
        for n, c in vars(optimizers).items()
        if isinstance(c, type) and issubclass(c, optimizers.Optimizer) and n not in no
    )


def name_of(recipe: Recipe, family: Family) -> str:
    """Return what a case is called."""
    return f"{recipe.name}-{family}"


def train(worker: Worker, recipe: Recipe, family: Family) -> None:
    """Train one recipe through the servers; worker 0 compares with one process."""
    data = recipe.data(worker.count)
    with policy(family.keras, recipe.policy):
        client = worker.client(name_of(recipe, family), piece_bytes=PIECE_BYTES)

        def start(model: Any) -> None:
            """Make the weights of worker 1 others, which the servers or the broadcast make equal again."""
            if worker.index:
                model.set_weights([weight + 1 for weight in model.get_weights()])
            if recipe.compile.get("run_eagerly") or recipe.name == "frozen":
                model.set_weights(client.broadcast(model.get_weights()))

        wrap = functools.partial(ParameterServerOptimizer, client=client)
        model = _trained(recipe, family, wrap, part(data, worker.index), BATCH, start)
        reduced = client.push_pull([value / 2 for value in arrays(model.weights)], "sum", "weights")
        client.close(done=False)
        for own, mean in zip(arrays(model.weights), reduced, strict=True):
            np.testing.assert_array_equal(own, mean, "the workers' weights differ")
        if worker.index:
            return
        reference = _trained(recipe, family, recipe.reference, union(data), BATCH * worker.count, lambda model: None)
    compare(arrays(model.weights), arrays(reference.weights), recipe.rtol, recipe.atol, "weights")
    slots = optimizer_arrays(model.optimizer), optimizer_arrays(reference.optimizer)
    compare(*slots, recipe.rtol, recipe.atol, "optimizer variables")


def _trained(recipe: Recipe, family: Family, wrap: Any, data: Any, batch: int, start: Callable[[Any], None]) -> Any:
    keras = family.keras
    keras.utils.set_random_seed(7)
    model = recipe.model(keras)
    if recipe.seeds_differ:
        model(data[0][:1])
    start(model)
    model.compile(recipe.optimizer(family, wrap), **recipe.compile)
    recipe.train(model, data, batch)
    inner_optimizer(model.optimizer).finalize_variable_values(model.trainable_variables)  # `fit` does it by itself
    return model


def update(worker: Worker, family: Family, name: str) -> None:
    """Make three updates of given gradients, one of them sparse, with an optimizer class in its default setting."""
    make = getattr(family.optimizers, name)
    gradients = np.random.default_rng(3).normal(size=(3, worker.count, 6, 4)).astype("float32")
    client = worker.client(f"{name}-{family}", piece_bytes=PIECE_BYTES)
    result = _updated(family, ParameterServerOptimizer(make(0.1), client), gradients[:, worker.index])
    client.close(done=False)
    reference = _updated(family, make(0.1), gradients.mean(1, dtype="float32"))
    compare(result, reference, 1e-5, 1e-6, name)


def go_on(worker: Worker, family: Family) -> None:
    """Make one update alone, the same on all workers, then wrap the optimizer and make two more."""
    gradients = np.random.default_rng(4).normal(size=(3, worker.count, 6, 4)).astype("float32")
    gradients[0] = gradients[0, :1]
    client = worker.client(f"continued-{family}", piece_bytes=PIECE_BYTES)
    optimizer, variables = family.optimizers.Adam(0.1), _variables(family)
    _apply(optimizer, variables, gradients[:1, 0])
    _apply(ParameterServerOptimizer(optimizer, client), variables, gradients[1:, worker.index])
    client.close(done=False)
    reference = _updated(family, family.optimizers.Adam(0.1), gradients.mean(1, dtype="float32"))
    compare(arrays(variables) + optimizer_arrays(optimizer), reference, 1e-5, 1e-6, "after going on")


def _updated(family: Family, optimizer: Any, gradients: np.ndarray) -> list[np.ndarray]:
    variables = _variables(family)
    _apply(optimizer, variables, gradients)
    return arrays(variables) + optimizer_arrays(optimizer)


def _variables(family: Family) -> list[Any]:
    start = np.linspace(-1, 1, 24, dtype="float32").reshape(6, 4)
    make = family.keras.Variable if family.keras_name == "keras3" else tf.Variable
    return [make(start, name="a"), make(start[0], name="b")]


def _apply(optimizer: Any, variables: list[Any], gradients: np.ndarray) -> None:
    for gradient in gradients:
        optimizer.apply_gradients(zip([tf.constant(gradient), tf.constant(gradient[0])], variables, strict=True))
    optimizer.finalize_variable_values(variables)


def compare(values: list[np.ndarray], references: list[np.ndarray], rtol: float, atol: float, what: str) -> None:
    """Check that arrays are equal to their references within a tolerance."""
    assert len(values) == len(references), what
    for index, (value, reference) in enumerate(zip(values, references, strict=True)):
        np.testing.assert_allclose(
            value.astype("float64"), reference.astype("float64"), rtol, atol, err_msg=f"{what}[{index}]"
        )


__all__ = ["cases", "classes", "compare", "go_on", "name_of", "train", "update"]
