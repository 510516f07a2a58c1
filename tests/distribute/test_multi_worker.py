"""The `multi_worker` strategy: what every rank ends with against one process, without a wrapped optimizer."""

from __future__ import annotations

from typing import Any

import pytest

import hvdx as hvd
from hvdx.distribute import strategy
from tests.training.models import BATCH
from tests.training.recipes import RECIPES, Recipe, train_on_batches
from tests.training.support import (
    Family,
    arrays,
    assert_equal_everywhere,
    assert_same_bits,
    optimizer_arrays,
    part,
    policy,
    together,
    union,
)

pytestmark = pytest.mark.np(2)

# "embedding" without "auto" differs from another recipe only in options of hvd.DistributedOptimizer. All that the
# legacy optimizers do differently is where they ask the strategy to reduce.
LEGACY_TOO = ("sgd", "clipnorm", "loss-scale-inside", "embedding-auto-rows")
CASES = [
    (recipe, family)
    for recipe in RECIPES
    for family in recipe.families
    if recipe.name not in ("embedding-dense", "embedding-rows") and (not family.legacy or recipe.name in LEGACY_TOO)
]


@pytest.mark.parametrize(("recipe", "family"), CASES, ids=[f"{recipe.name}-{family}" for recipe, family in CASES])
def test_equals_one_process(world: Any, recipe: Recipe, family: Family) -> None:
    data = recipe.data(world.size())
    with policy(family.keras, recipe.policy):
        reference = _trained(recipe, family, union(data), BATCH * world.size(), None)
        # The batch is cut among the ranks; but train_on_batch of Keras 3 takes what a rank itself trains on.
        own = recipe.train is train_on_batches and family.keras_name == "keras3"
        given = part(data, world.rank()) if own else union(data)
        batch = BATCH if own else BATCH * world.size()
        model = together(lambda: _trained(recipe, family, given, batch, strategy("multi_worker")))
    weights, slots = arrays(model.weights), optimizer_arrays(model.optimizer)
    assert_same_bits(weights + slots, "weights and optimizer variables")
    assert_equal_everywhere(weights, arrays(reference.weights), recipe.rtol, recipe.atol)
    assert_equal_everywhere(
        slots, optimizer_arrays(reference.optimizer), recipe.rtol, recipe.atol, "optimizer variables"
    )


def _trained(recipe: Recipe, family: Family, data: Any, batch: int, under: Any) -> Any:
    keras = family.keras
    keras.utils.set_random_seed(7 + (hvd.rank() if under is not None and recipe.seeds_differ else 0))

    def reference(optimizer: Any) -> Any:
        return recipe.reference(optimizer) if hvd.size() > 1 and under is None else optimizer

    def compiled() -> Any:
        model = recipe.model(keras)
        if recipe.by_tape:
            model.distributed = under is not None
        if recipe.seeds_differ:
            model(data[0][:1])
        model.compile(recipe.optimizer(family, reference), **recipe.compile)
        return model

    if under is None:
        model = compiled()
    else:
        with under.scope():
            model = compiled()
    recipe.train(model, data, batch)
    return model
