"""What travels: fusion, compression, operations, missing gradients, and gradients that do not match."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.training.reducer import GradientReducer
from tests.training.support import (
    Family,
    arrays,
    assert_equal_everywhere,
    assert_same_bits,
    every_family,
    every_keras,
    gathered,
    raised_everywhere,
    together,
)

pytestmark = pytest.mark.np(2)

ranks_needed = pytest.mark.np(2, plain=False)
FEATURES = 3


def _variables(family: Family) -> list[Any]:
    make = family.keras.Variable if family.keras_name == "keras3" else tf.Variable
    return [make(np.zeros(shape, "float32"), name=name) for name, shape in (("a", (40, 3)), ("b", (7,)), ("c", ()))]


def _gradients(rank: int) -> list[Any]:
    rng = np.random.default_rng(rank)
    return [tf.constant(rng.normal(size=shape), tf.float32) for shape in ((40, 3), (7,), ())]


def _applied(family: Family, gradients: list[Any], **options: Any) -> list[np.ndarray]:
    """Return the variables after one step of SGD with rate -1 from zero: the reduced gradients."""
    variables = _variables(family)
    optimizer = hvd.DistributedOptimizer(family.optimizers.SGD(1.0), **options)
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    return [-array for array in arrays(variables)]


@every_family
def test_every_fusion_threshold_gives_the_same_bits(world: Any, family: Family) -> None:
    own = _gradients(world.rank())
    results = [
        together(lambda threshold=threshold: _applied(family, own, fusion_threshold=threshold))
        for threshold in (None, 0, 64, 500, 1 << 30)
    ]
    for result in results:
        assert_same_bits(result, "reduced gradients")
        assert_equal_everywhere(result, results[0], 0, 0)
    mean = [np.mean([g.numpy() for g in group], 0) for group in zip(*map(_gradients, range(world.size())), strict=True)]
    assert_equal_everywhere(results[0], mean, 1e-6, 1e-7)


@every_family
@pytest.mark.parametrize("op", ["Average", "Sum", "Min", "Max", "Product"])
def test_operations(world: Any, family: Family, op: str) -> None:
    result = together(lambda: _applied(family, _gradients(world.rank()), op=getattr(world, op)))
    function = {"Average": np.mean, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[op]
    groups = zip(*map(_gradients, range(world.size())), strict=True)
    reference = [np.asarray(function([g.numpy() for g in group], axis=0)) for group in groups]
    assert_equal_everywhere(result, reference, 1e-6, 1e-7)


@every_keras
@pytest.mark.parametrize(("codec", "tolerance"), [("none", 1e-6), ("fp16", 2e-3), ("bf16", 2e-2)])
def test_compression(world: Any, family: Family, codec: str, tolerance: float) -> None:
    """One rank alone sends nothing and rounds nothing; two ranks round to 11 or 8 bits, once or twice."""
    own = _gradients(world.rank())
    result = together(lambda: _applied(family, own, compression=getattr(world.Compression, codec)))
    mean = [np.mean([g.numpy() for g in group], 0) for group in zip(*map(_gradients, range(world.size())), strict=True)]
    assert_same_bits(result, "reduced gradients")
    assert_equal_everywhere(result, mean, tolerance, tolerance if world.size() > 1 else 1e-6)
    if world.size() > 1 and codec != "none":
        assert any((a != b).any() for a, b in zip(result, mean, strict=True)), "nothing was compressed"


@every_family
def test_a_gradient_that_is_none_everywhere_stays_none(world: Any, family: Family) -> None:
    gradients = _gradients(world.rank())
    gradients[1] = None
    result = together(lambda: _applied(family, gradients))
    assert_same_bits(result, "variables")
    assert_equal_everywhere(result[1:2], [np.zeros(7)], 0, 0)
    assert np.abs(result[0]).min() > 0


@every_family
@ranks_needed
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_gradient_that_one_rank_lacks(world: Any, family: Family, index: int) -> None:
    gradients = _gradients(world.rank())
    if world.rank() == 1:
        gradients[index] = None
    messages = raised_everywhere(world.GradientError, lambda: _applied(family, gradients))
    for message in messages:
        assert re.search(rf"{'abc'[index]}(:0)?: no gradient on rank 1, a gradient on rank 0", message), message
        assert "missing_gradients='zeros'" in message


@every_family
@pytest.mark.parametrize("scaled", [False, True])
def test_a_missing_gradient_counts_as_zeros_where_that_is_asked_for(world: Any, family: Family, scaled: bool) -> None:
    gradients = _gradients(world.rank())
    if world.rank() == 1:
        gradients[1] = None
    everywhere = [_gradients(rank) for rank in range(world.size())]
    variables = _variables(family)
    optimizer = hvd.DistributedOptimizer(family.optimizers.SGD(1.0), missing_gradients="zeros")
    if scaled:
        optimizer = family.loss_scale(optimizer)
        scale = 2.0**15
        gradients = [None if g is None else g * scale for g in gradients]
        if family.keras_name != "keras3":
            gradients = optimizer.get_unscaled_gradients(gradients)
    together(lambda: optimizer.apply_gradients(list(zip(gradients, variables, strict=True))))
    mean = [np.mean([g[i].numpy() * (not (i == 1 and r == 1)) for r, g in enumerate(everywhere)], 0) for i in range(3)]
    assert_equal_everywhere([-a for a in arrays(variables)], mean, 1e-6, 1e-7)


@every_family
@ranks_needed
def test_gradients_that_one_rank_lacks_under_loss_scaling(world: Any, family: Family) -> None:
    variables, gradients = _variables(family), _gradients(world.rank())
    if world.rank() == 1:
        gradients[1] = None
    optimizer = family.loss_scale(hvd.DistributedOptimizer(family.optimizers.SGD(1.0)))
    messages = raised_everywhere(
        world.GradientError, lambda: optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    )
    assert all("no gradient on rank 1" in message for message in messages), messages


@ranks_needed
def test_a_rank_without_any_gradient(world: Any) -> None:
    """The others must not wait for it."""
    x = tf.Variable([1.0, 2.0], name="x")

    def gradient() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(x) if world.rank() == 0 else tf.constant(1.0)
        return tape.gradient(loss, [x])

    messages = raised_everywhere(world.GradientError, gradient)
    assert all(re.search(r"x:0: no gradient on rank 1, a gradient on rank 0", message) for message in messages)
    graph = raised_everywhere((world.GradientError, tf.errors.UnknownError), tf.function(gradient))
    assert all("no gradient on rank 1" in message for message in graph)


@every_family
@ranks_needed
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_rank_whose_optimizer_gets_no_gradient(world: Any, family: Family, how: str, scaled: bool) -> None:
    """Keras raises while it traces then, on that rank alone; the others must hear of it."""
    [variable, *_] = _variables(family)
    optimizer = hvd.DistributedOptimizer(family.optimizers.SGD(1.0))
    optimizer = family.loss_scale(optimizer) if scaled else optimizer
    if hasattr(optimizer, "build"):
        optimizer.build([variable])
    gradient = _gradients(world.rank())[0] if world.rank() == 0 else None

    def apply() -> None:
        optimizer.apply_gradients([(gradient, variable)])

    messages = raised_everywhere(
        (world.GradientError, tf.errors.UnknownError), tf.function(apply) if how == "graph" else apply
    )
    assert all(re.search(r"a(:0)?: no gradient on rank 1, a gradient on rank 0", text) for text in messages), messages
    assert np.abs(arrays([variable])[0]).max() == 0


@every_family
def test_no_rank_has_a_gradient_for_its_optimizer(world: Any, family: Family) -> None:
    """One process raises, so all ranks do; the text is Keras's."""
    optimizer = hvd.DistributedOptimizer(family.optimizers.SGD(1.0))
    pairs = [(None, variable) for variable in _variables(family)]
    if hasattr(optimizer, "build"):
        optimizer.build([variable for _, variable in pairs])

    def apply() -> None:
        optimizer.apply_gradients(pairs)

    for how in (apply, tf.function(apply)):
        messages = raised_everywhere((ValueError, tf.errors.InvalidArgumentError), how)
        assert all("No gradients provided for any variable" in message for message in messages)


def test_no_gradient_on_any_rank(world: Any) -> None:
    x = tf.Variable([1.0, 2.0])
    for compiled in (False, True):

        def gradient() -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.constant(1.0)
            return tape.gradient(loss, [x])

        assert together(tf.function(gradient) if compiled else gradient) == [None]


@ranks_needed
def test_only_a_sparse_gradient_and_one_rank_lacks_it(world: Any) -> None:
    table = tf.Variable(tf.ones([30, 2]), name="table")
    for sparse_as_dense in (True, False, "auto"):

        def gradient(sparse_as_dense: Any = sparse_as_dense) -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=sparse_as_dense) as tape:
                rows = tf.gather(table, [1, 2]) if world.rank() == 0 else tf.zeros([2, 2])
                loss = tf.reduce_sum(rows)
            return tape.gradient(loss, table)

        messages = raised_everywhere(world.GradientError, gradient)
        assert all("table:0: no gradient on rank 1, a gradient on rank 0" in message for message in messages)


@every_keras
@ranks_needed
def test_a_gradient_missing_inside_fit(world: Any, family: Family) -> None:
    """TensorFlow wraps what a step raises; the text must still say which variable and which ranks."""
    keras = family.keras

    class Branch(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = keras.layers.Dense(2, name="always"), keras.layers.Dense(2, name="sometimes")

        def call(self, inputs: Any) -> Any:
            extra = self.sometimes(inputs)
            return self.always(inputs) + (extra if world.rank() == 0 else tf.stop_gradient(extra))

    model = Branch()
    model.compile(hvd.DistributedOptimizer(family.optimizers.SGD(0.1)), "mse")
    x = np.random.default_rng(world.rank()).normal(size=(8, 3)).astype("float32")
    messages = raised_everywhere(
        (tf.errors.UnknownError, world.GradientError), lambda: model.fit(x, x[:, :2], batch_size=4, verbose=0)
    )
    for message in messages:
        assert re.search(r"sometimes/kernel(:0)?: no gradient on rank 1, a gradient on rank 0", message), message


@ranks_needed
@pytest.mark.parametrize("difference", ["shape", "dtype", "number"])
def test_gradients_that_do_not_match(world: Any, difference: str) -> None:
    second = world.rank() == 1
    shape = (3, 2) if difference == "shape" and second else (2, 3)
    dtype = tf.float64 if difference == "dtype" and second else tf.float32
    variables = [tf.Variable(tf.ones(shape, dtype), name="kernel"), tf.Variable(tf.ones([2]), name="bias")]
    if difference == "number" and second:
        variables = variables[:1]

    def gradient() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.add_n([tf.reduce_sum(tf.cast(variable, tf.float32)) for variable in variables])
        return tape.gradient(loss, variables)

    messages = raised_everywhere(world.MismatchError, gradient)
    expected = {"shape": "kernel:0 3x2 float32", "dtype": "kernel:0 2x3 float64", "number": "1 gradients"}[difference]
    for message in messages:
        assert "rank 0: allreduce (Average) of 2 gradients (kernel:0 2x3 float32, bias:0 2 float32)" in message
        assert f"rank 1: allreduce (Average) of {'1' if difference == 'number' else '2'} gradients" in message
        assert expected in message
    graph = raised_everywhere((world.MismatchError, tf.errors.UnknownError), tf.function(gradient))
    assert all(expected in message for message in graph)


def test_ranks_work_together_after_errors(world: Any) -> None:
    """What stands above must not have put them out of step."""
    assert gathered(world.rank()) == list(range(world.size()))
    assert float(world.allreduce(tf.constant(1.0), world.Sum)) == world.size()


@ranks_needed
def test_equal_layers_are_told_apart_where_each_rank_lacks_another(world: Any) -> None:
    """The counters in names do not count, but the place of a variable does: these two must not be averaged."""
    variables = [tf.Variable(tf.zeros(3), name=f"dense_{number}/kernel") for number in (5, 6)]
    gradients: list[Any] = [tf.ones(3), tf.ones(3)]
    gradients[world.rank() % 2] = None
    messages = raised_everywhere(world.GradientError, lambda: GradientReducer().reduce(gradients, variables))
    for message in messages:
        assert "dense_5/kernel" in message
        assert "dense_6/kernel" in message
