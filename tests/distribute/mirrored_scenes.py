"""What a process with several devices, or each of two such, does in the tests of the mirrored strategy."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import hvdx as hvd
from hvdx.distribute import strategy
from hvdx.keras_api import inner_optimizer
from tests.distribute import mirrored_sums as sums
from tests.distribute import mirrored_training as training
from tests.distribute import mirrored_values as values
from tests.distribute.mirrored_checks import check_mirrored, compare
from tests.training.models import BATCH
from tests.training.recipes import RECIPES, Recipe
from tests.training.support import FAMILIES, Family, arrays, optimizer_arrays, policy, union

WRAPPED = {
    "global_clipnorm", "accumulation", "loss-scale-outside", "loss-scale-inside", "embedding-rows", "embedding-dense",
}  # fmt: skip
"""Those that are trained a second time with an optimizer that is wrapped as well."""
PLAIN, TWICE = "", "-wrapped"
HALVES = ("recipes-0", "recipes-1")
"""Every second recipe each, so that two processes can share them."""


def cases() -> list[tuple[str, Recipe, Family]]:
    """Return what to train: "" or "-wrapped", and a recipe and a Keras."""
    found = []
    for recipe in RECIPES:
        for family in recipe.families:
            found.append((PLAIN, recipe, family))
            if recipe.name in WRAPPED:
                found.append((TWICE, recipe, family))
    return found


def name_of(case: tuple[str, Recipe, Family]) -> str:
    """Return what a case is called."""
    return f"{case[1].name}{case[0]}-{case[2]}"


def play(name: str) -> dict[str, str]:
    """Play a scene, or all those of a name; return what they came to."""
    if name in HALVES:
        half = cases()[HALVES.index(name) :: 2]
        return {name_of(case): _outcome(functools.partial(_train_recipe, *case)) for case in half}
    if name in SCENES:
        return {name: _outcome(SCENES[name])}
    scene = SCENES_OF_EACH_KERAS[name]
    return {f"{name}-{family}": _outcome(functools.partial(scene, family)) for family in FAMILIES}


def _outcome(scene: Callable[[], None]) -> str:
    try:
        scene()
    except Exception:
        return traceback.format_exc()
    return ""


SCENES: dict[str, Callable[[], None]] = {
    name.removeprefix("play_"): scene
    for module in (values, sums)
    for name, scene in vars(module).items()
    if name.startswith("play_")
}
SUMS = [name.removeprefix("play_") for name in vars(sums) if name.startswith("play_")]
SCENES_OF_EACH_KERAS: dict[str, Callable[[Family], None]] = {
    name.removeprefix("play_"): scene for name, scene in vars(training).items() if name.startswith("play_")
}


# -- the yardstick -----------------------------------------------------------------------------------------------------


def _train_recipe(how: str, recipe: Recipe, family: Family) -> None:
    mirrored = strategy("mirrored")
    replicas = mirrored.num_replicas_in_sync
    data = recipe.data(replicas)
    keras = family.keras

    def wrap(optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, **recipe.wrapped) if how == TWICE else optimizer

    with policy(keras, recipe.policy):
        # The ranks' own first values differ: those of rank 0 count.
        keras.utils.set_random_seed(7 + hvd.rank())
        with mirrored.scope():
            model = _compiled(recipe, family, wrap, replicas)
        recipe.train(model, union(data), BATCH * replicas)
        keras.utils.set_random_seed(7)
        reference = _compiled(recipe, family, recipe.reference, 1)
        recipe.train(reference, union(data), BATCH * replicas)
    check_mirrored([*model.weights, *_variables(model.optimizer)])
    compare(arrays(model.weights), arrays(reference.weights), recipe.rtol, recipe.atol, "weights")
    slots = optimizer_arrays(model.optimizer), optimizer_arrays(reference.optimizer)
    compare(*slots, recipe.rtol, recipe.atol, "optimizer variables")


def _compiled(recipe: Recipe, family: Family, wrap: Any, replicas: int) -> Any:
    model = recipe.model(family.keras)
    if recipe.by_tape:
        model.distributed = replicas > 1
    if hasattr(model, "loss_of"):  # a loss of one's own is divided by the number of replicas, as under any strategy
        model.loss_of = lambda data: tf.reduce_mean((model(data[0]) - data[1]) ** 2) / replicas
    if recipe.seeds_differ:
        model(recipe.data(1)[0][0, 0, :1])
    model.compile(recipe.optimizer(family, wrap), **recipe.compile)
    return model


def _variables(optimizer: Any) -> list[Any]:
    variables = inner_optimizer(optimizer).variables
    return list(variables() if callable(variables) else variables)
