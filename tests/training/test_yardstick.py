"""The yardstick: ranks with different batches end with the weights of one process that trains on their union.

The reference runs on every rank, in the same process, with an optimizer that is not wrapped.
"""

from __future__ import annotations

from typing import Any

import pytest

import hvdx as hvd
from tests.training.models import BATCH
from tests.training.recipes import RECIPES, Recipe
from tests.training.support import (
    Family,
    arrays,
    assert_equal_everywhere,
    assert_same_bits,
    counting,
    optimizer_arrays,
    part,
    policy,
    together,
    union,
)

pytestmark = pytest.mark.np(2)

CASES = [(recipe, family) for recipe in RECIPES for family in recipe.families]


@pytest.mark.parametrize(("recipe", "family"), CASES, ids=[f"{recipe.name}-{family}" for recipe, family in CASES])
def test_equals_one_process(world: Any, recipe: Recipe, family: Family) -> None:
    data = recipe.data(world.size())
    with policy(family.keras, recipe.policy):
        reference = _trained(recipe, family, union(data), BATCH * world.size(), distributed=False)
        model, collectives = together(lambda: _counted(recipe, family, part(data, world.rank())))
    weights, slots = arrays(model.weights), optimizer_arrays(model.optimizer)
    assert_same_bits(weights + slots, "weights and optimizer variables")
    assert_equal_everywhere(weights, arrays(reference.weights), recipe.rtol, recipe.atol)
    assert_equal_everywhere(
        slots, optimizer_arrays(reference.optimizer), recipe.rtol, recipe.atol, "optimizer variables"
    )
    if world.size() > 1:
        assert collectives == recipe.collectives[-1 if family.keras_name == "keras3" else 0]


def _counted(recipe: Recipe, family: Family, data: Any) -> tuple[Any, int]:
    with counting() as collectives:
        model = _trained(recipe, family, data, BATCH, distributed=True)
    return model, collectives[0]


def _trained(recipe: Recipe, family: Family, data: Any, batch: int, distributed: bool) -> Any:
    def wrap(optimizer: Any) -> Any:
        if not distributed:
            return recipe.reference(optimizer) if hvd.size() > 1 else optimizer  # one rank changes nothing
        if recipe.by_tape:
            return optimizer
        return hvd.DistributedOptimizer(optimizer, **recipe.wrapped)

    keras = family.keras
    keras.utils.set_random_seed(7 + (hvd.rank() if distributed and recipe.seeds_differ else 0))
    model = recipe.model(keras)
    if recipe.by_tape:
        model.distributed = distributed
    if recipe.seeds_differ:
        model(data[0][:1])
        if distributed:
            hvd.broadcast_variables(model.variables)
    model.compile(recipe.optimizer(family, wrap), **recipe.compile)
    recipe.train(model, data, batch)
    return model
