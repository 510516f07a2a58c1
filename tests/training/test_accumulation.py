"""`backward_passes_per_step` in fit and in tapes: passes of several ranks against one process with their union."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from tests.training.models import BATCH, OUTPUTS, VOCABULARY, dense, embedding, linear_data
from tests.training.recipes import adam, fit, sgd, with_dense_gradients
from tests.training.support import (
    FAMILIES,
    KERAS_3,
    LEGACY,
    Family,
    arrays,
    assert_equal_everywhere,
    assert_same_bits,
    counting,
    every_family,
    part,
    together,
)

pytestmark = pytest.mark.np(2)
PASSES, UPDATES = 2, 3
NOT_KERAS_3 = [family for family in FAMILIES + LEGACY if family not in KERAS_3]
Wrap = Callable[[Any], Any]


def _data(ranks: int) -> Any:
    """Return x and y [passes, ranks, batch, ...], with a pass over that ends no update."""
    return linear_data(ranks, steps=PASSES * UPDATES + 1)


def _with_an_inf(ranks: int) -> Any:
    x, y = _data(ranks)
    x[PASSES, -1, 0, 0] = np.inf  # in the first pass of the second update, which then is not made
    return x, y


def _tokens(ranks: int) -> Any:
    rng = np.random.default_rng(2)
    shape = (PASSES * UPDATES + 1, ranks, BATCH)
    return rng.integers(0, VOCABULARY, (*shape, 3)).astype("int32"), rng.normal(size=(*shape, OUTPUTS)).astype(
        "float32"
    )


def _scaled(family: Family, wrap: Wrap) -> Any:
    return family.loss_scale(wrap(family.optimizers.SGD(0.1, momentum=0.9)))


@dataclass(frozen=True)
class Case:
    """An optimizer, a model, data, how it is compiled, for whom, and whether an update is one collective."""

    name: str
    optimizer: Callable[[Family, Wrap], Any]
    model: Callable[[Any], Any] = dense
    data: Callable[[int], Any] = _data
    reference: Wrap = lambda optimizer: optimizer
    compile: dict[str, Any] = field(default_factory=dict)
    families: list[Family] = field(default_factory=lambda: FAMILIES + LEGACY)
    counted: bool = True


CASES = [
    Case("adam-clipped", adam(global_clipnorm=0.05)),
    Case("momentum-clipped-eager", sgd(momentum=0.9, clipnorm=0.05), compile={"run_eagerly": True}),
    Case("decay-ema", adam(weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2), families=NOT_KERAS_3[:1]),
    Case("several-steps-per-execution", adam(), compile={"steps_per_execution": 3}),
    Case("embedding", adam(), embedding, _tokens, with_dense_gradients),  # dense here too, so one exchange carries it
    Case("loss-scale", _scaled, counted=False),
    Case("loss-scale-inf", _scaled, data=_with_an_inf, families=NOT_KERAS_3),
]


@pytest.mark.parametrize(
    ("case", "family"),
    [(case, family) for case in CASES for family in case.families],
    ids=[f"{case.name}-{family}" for case in CASES for family in case.families],
)
def test_equals_one_process(world: Any, case: Case, family: Family) -> None:
    data = case.data(world.size())
    whole = tf.nest.map_structure(lambda a: a[:-1].reshape(-1, *a.shape[3:]), data)
    reference = _trained(case, family, whole, PASSES * BATCH * world.size(), case.reference)

    def train() -> Any:
        with counting() as collectives:
            wrap = lambda optimizer: hvd.DistributedOptimizer(optimizer, backward_passes_per_step=PASSES)  # noqa: E731
            model = _trained(case, family, part(data, world.rank()), BATCH, wrap)
        return model, collectives[0]

    model, collectives = together(train)
    weights = arrays(model.weights)
    assert_same_bits(weights, "weights")
    assert_equal_everywhere(weights, arrays(reference.weights), 1e-4, 1e-5)
    inner = hvd.keras_api.inner_optimizer(model.optimizer)
    assert int(inner.iterations) == int(reference.optimizer.iterations) == UPDATES
    if world.size() > 1 and case.counted:
        assert collectives == UPDATES


def _trained(case: Case, family: Family, data: Any, batch: int, wrap: Wrap) -> Any:
    family.keras.utils.set_random_seed(7)
    model = case.model(family.keras)
    model.compile(case.optimizer(family, wrap), "mse", **case.compile)
    fit(model, data, batch)
    return model


@pytest.mark.parametrize("traced", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize("family", NOT_KERAS_3, ids=str)
def test_each_list_of_variables_has_its_own_passes(world: Any, family: Family, traced: bool) -> None:
    """As in a GAN: one optimizer, two lists; one variable has no gradient, and one has one in some passes only."""
    optimizer = hvd.DistributedOptimizer(family.optimizers.SGD(1.0), backward_passes_per_step=2)
    a, b, idle, some = (tf.Variable([0.0]) for _ in range(4))
    if not family.legacy:
        optimizer.build([a, b, idle, some])
    rank = float(world.rank())

    def step(number: float, with_some: bool) -> None:
        value = tf.reshape(tf.cast(number, tf.float32) + rank, [1])
        optimizer.apply_gradients([(value, a), (None, idle), (value if with_some else None, some)])
        optimizer.apply_gradients([(10.0 * value, b)])

    one = tf.function(step) if traced else step

    def train() -> None:
        for number in range(5):  # 0, 1 and 2, 3 make updates; 4 is left over
            one(tf.constant(float(number)), number % 2 == 0)

    together(train)
    mean = (world.size() - 1) / 2
    # (0 + 1) / 2 and (2 + 3) / 2, each with the mean of the ranks; `some` has its gradient in 0 and 2 only
    expected = [-(3.0 + 2 * mean), -10 * (3.0 + 2 * mean), 0.0, -(1.0 + mean)]
    values = arrays([a, b, idle, some])
    assert_equal_everywhere(values, [np.array([value]) for value in expected], 1e-6, 1e-6)
    assert int(optimizer.iterations) == 4


@pytest.mark.parametrize("traced", [True, False], ids=["function", "eager"])
def test_a_v1_optimizer_outside_of_graphs(world: Any, traced: bool) -> None:
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(1.0, 0.5), backward_passes_per_step=2)
    variable, factor = tf.Variable([0.0]), tf.Variable(float(world.rank()))

    def step() -> None:
        pairs = optimizer.compute_gradients(lambda: variable * factor, [variable])
        optimizer.apply_gradients([(tf.clip_by_value(gradient, -1.0, 1.0), v) for gradient, v in pairs])
        factor.assign_add(2.0)

    one = tf.function(step) if traced else step
    together(lambda: [one() for _ in range(5)])
    # gradients 0, 2, 4, 6, 8 + rank: both means are clipped to 1; momentum makes 1 and 1.5 of it
    assert_equal_everywhere([variable.numpy()], [np.array([-2.5])], 1e-6, 0)


@every_family
def test_no_file_holds_the_sums(world: Any, family: Family, tmp_path: Path) -> None:
    """A model saved in the middle of an accumulation goes on with a new one; Keras 3 saves its own."""
    x, y = part(_data(world.size()), world.rank())
    model = dense(family.keras)
    model.compile(hvd.DistributedOptimizer(family.optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=2), "mse")
    together(lambda: fit(model, (x[: 3 * BATCH], y[: 3 * BATCH]), BATCH))
    plain = family.optimizers.SGD(0.1, momentum=0.9)
    if family in KERAS_3:
        plain.gradient_accumulation_steps = 2
    plain.apply_gradients([(tf.zeros_like(v), v) for v in map(tf.Variable, model.get_weights())])
    names = []
    for optimizer in (plain, model.optimizer):
        saved = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "checkpoint"))
        names.append(
            [(name.rpartition("optimizer/")[2].split("/")[0], shape) for name, shape in tf.train.list_variables(saved)]
        )
    assert sorted(names[0]) == sorted(names[1])
    file = tmp_path / ("model.keras" if family in KERAS_3 else "model.h5")  # as each restores its optimizer from
    model.save(str(file))
    loaded = hvd.load_model(file, backward_passes_per_step=2)
    assert int(loaded.optimizer.iterations) == 1
    together(lambda: fit(loaded, (x[: 2 * BATCH], y[: 2 * BATCH]), BATCH))
    assert int(loaded.optimizer.iterations) == 2
    clone = type(model.optimizer).from_config(model.optimizer.get_config())
    variable = tf.Variable([0.0])
    together(lambda: [clone.apply_gradients([(tf.constant([1.0]), variable)]) for _ in range(3)])
    assert int(clone.iterations) == 1
    np.testing.assert_allclose(variable.numpy(), [-0.1], rtol=1e-6)


@pytest.mark.parametrize("passes", [0, 1.5, True, "2"])
@every_family
def test_bad_number_of_passes(world: Any, family: Family, passes: Any) -> None:
    with pytest.raises(hvd.ConfigurationError, match="backward_passes_per_step"):
        hvd.DistributedOptimizer(family.optimizers.SGD(0.1), backward_passes_per_step=passes)


@pytest.mark.parametrize("family", KERAS_3, ids=str)
def test_keras_3_accumulates_by_itself(world: Any, family: Family) -> None:
    """One option under two names; contradictions are refused before the optimizer is changed."""
    optimizers = family.optimizers
    assert hvd.DistributedOptimizer(optimizers.SGD(), backward_passes_per_step=3).gradient_accumulation_steps == 3
    same = optimizers.SGD(gradient_accumulation_steps=3)
    assert hvd.DistributedOptimizer(same, backward_passes_per_step=3) is same
    other = optimizers.SGD(gradient_accumulation_steps=4)
    with pytest.raises(hvd.ConfigurationError, match=r"gradient_accumulation_steps=4.*backward_passes_per_step=3"):
        hvd.DistributedOptimizer(other, backward_passes_per_step=3)
    used = optimizers.SGD()
    used.build([tf.Variable([0.0])])
    with pytest.raises(hvd.ConfigurationError, match="has made its variables already"):
        hvd.DistributedOptimizer(used, backward_passes_per_step=3)
    assert hvd.DistributedOptimizer(used).gradient_accumulation_steps is None
    if hasattr(optimizers, "MultiOptimizer"):
        with pytest.raises(hvd.UnsupportedError, match="to the optimizers inside it"):
            hvd.DistributedOptimizer(optimizers.MultiOptimizer([]), backward_passes_per_step=3)
