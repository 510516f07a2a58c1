"""Wrapping in place: what stays as it was, what is refused, and what happens with one rank."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.training.xla import is_distributed
from tests.training.models import dense, linear_data
from tests.training.recipes import fit
from tests.training.support import (
    FAMILIES,
    LEGACY,
    Family,
    arrays,
    assert_equal_everywhere,
    every_family,
    optimizer_arrays,
    part,
    raised_everywhere,
    together,
)

pytestmark = pytest.mark.np(2)


@every_family
def test_the_object_stays_what_it_was(world: Any, family: Family) -> None:
    """Slots, iterations, schedule, configuration and identity survive; so does a model that holds the optimizer."""
    schedule = family.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    optimizer = family.optimizers.Adam(schedule)
    cls = type(optimizer)
    model = dense(family.keras)
    model.compile(optimizer, "mse")
    fit(model, part(linear_data(1), 0), 6)
    before, config = optimizer_arrays(optimizer), optimizer.get_config()
    wrapped = hvd.DistributedOptimizer(optimizer)
    assert wrapped is optimizer is model.optimizer
    assert int(optimizer.iterations) == 4
    assert all((a == b).all() for a, b in zip(before, optimizer_arrays(optimizer), strict=True))
    assert len(before) == len(optimizer_arrays(optimizer))
    assert isinstance(optimizer, cls)
    assert (type(optimizer).__name__, type(optimizer).__module__) == (cls.__name__, cls.__module__)
    assert optimizer.get_config() == config


@every_family
def test_a_copy_from_the_configuration_reduces_too(world: Any, family: Family) -> None:
    original = hvd.DistributedOptimizer(family.optimizers.SGD(1.0), op=world.Sum)
    clones = [type(original).from_config(original.get_config()), copy.copy(original)]
    if family.keras_name == "keras3" or family.legacy:  # the others of tf_keras refuse it
        clones.append(copy.deepcopy(original))
    for clone in clones:
        assert is_distributed(clone)
        variable = tf.Variable([0.0])
        together(lambda c=clone, v=variable: c.apply_gradients([(tf.constant([1.0]), v)]))
        assert_equal_everywhere([variable.numpy()], [np.array([-1.0 * world.size()])], 0, 0)


@every_family
def test_other_objects_of_the_class_are_left_alone(world: Any, family: Family) -> None:
    hvd.DistributedOptimizer(family.optimizers.SGD(1.0))
    plain, variable = family.optimizers.SGD(1.0), tf.Variable([0.0])
    assert not is_distributed(plain)
    plain.apply_gradients([(tf.constant([1.0 + world.rank()]), variable)])
    assert float(variable[0]) == -1.0 - world.rank()


@every_family
def test_loss_scaling_around_other_optimizers_is_left_alone(world: Any, family: Family) -> None:
    """hvdx adapts the class; a rank that trains something of its own must not wait for the others."""
    hvd.DistributedOptimizer(family.optimizers.SGD(1.0))
    optimizer, variable = family.loss_scale(family.optimizers.SGD(1.0)), tf.Variable([0.0])
    if world.rank() == 0:
        optimizer.apply_gradients([(tf.constant([np.inf]), variable)])
        assert float(variable[0]) == 0.0
        optimizer.apply_gradients([(tf.constant([2.0**15]), variable)])
        assert float(variable[0]) < 0.0


@every_family
def test_a_size_of_one_changes_nothing(family: Family) -> None:
    """Also with options that would change numbers between ranks; needs a world of its own, so it runs without MPI."""
    if hvd.is_initialized():
        pytest.skip("the world has been joined")
    hvd.init("single")
    try:
        results = []
        for wrap in (lambda o: o, lambda o: hvd.DistributedOptimizer(o, compression=hvd.Compression.fp16)):
            family.keras.utils.set_random_seed(3)
            model = dense(family.keras)
            model.compile(wrap(family.optimizers.Adam(0.01, global_clipnorm=0.1)), "mse")
            fit(model, part(linear_data(1), 0), 6)
            results.append(model.get_weights())
        assert all((a == b).all() for a, b in zip(*results, strict=True))
    finally:
        hvd.shutdown()


def _not_optimizers(family: Family) -> dict[str, tuple[Any, str]]:
    optimizers, keras = family.optimizers, family.keras
    return {
        "class": (optimizers.SGD, r"takes an optimizer, not a class\. Write SGD\(\.\.\.\)\. Received: <class"),
        "string": ("adam", r"Write keras\.optimizers\.get\('adam'\)\. Received: 'adam'"),
        "none": (None, r"Received: None"),
        "number": (0.1, r"Received: 0\.1"),
        "tape": (tf.GradientTape(), r"wrapped with hvd\.DistributedGradientTape"),
        "wrapped tape": (hvd.DistributedGradientTape(tf.GradientTape()), r"wrapped with hvd\.DistributedGradientTape"),
        "model": (dense(keras), r"takes an optimizer of Keras 3, tf_keras, Keras 2 or tf\.compat\.v1\.train"),
        "schedule": (keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), r"takes an optimizer of Keras 3"),
    }


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_what_is_no_optimizer(world: Any, family: Family) -> None:
    for value, message in _not_optimizers(family).values():
        with pytest.raises(world.OptimizerError, match=message):
            hvd.DistributedOptimizer(value)


@every_family
def test_wrapped_twice(world: Any, family: Family) -> None:
    once = hvd.DistributedOptimizer(family.optimizers.SGD(0.1))
    with pytest.raises(world.OptimizerError, match="SGD is already a DistributedOptimizer; wrapped twice"):
        hvd.DistributedOptimizer(once)
    with pytest.raises(world.OptimizerError, match="SGD is already a DistributedOptimizer"):
        hvd.DistributedOptimizer(family.loss_scale(once))


def test_what_is_no_tape(world: Any) -> None:
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with pytest.raises(world.OptimizerError, match="It is already wrapped"):
        hvd.DistributedGradientTape(tape)
    for family in FAMILIES + LEGACY:
        with pytest.raises(world.OptimizerError, match=r"takes a tf\.GradientTape.*SGD"):
            hvd.DistributedGradientTape(family.optimizers.SGD(0.1))
    with pytest.raises(world.OptimizerError, match=r"takes a tf\.GradientTape.*Received: <class"):
        hvd.DistributedGradientTape(tf.GradientTape)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "Median"}, "'Median'"),
        ({"sparse_as_dense": "always"}, r"sparse_as_dense is True, False or 'auto'\. Received: 'always'"),
        ({"missing_gradients": "ignore"}, r"missing_gradients is 'error' or 'zeros'\. Received: 'ignore'"),
        ({"fusion_threshold": -1}, r"fusion_threshold is a number of bytes, 0 or more\. Received: -1"),
        ({"fusion_threshold": "64MB"}, r"fusion_threshold is a number of bytes"),
        ({"fusion_threshold": True}, r"fusion_threshold is a number of bytes"),
        ({"compression": "fp16"}, r"compression is hvd\.Compression\.none, fp16 or bf16.*Received: 'fp16'"),
    ],
)
def test_options_without_a_meaning(world: Any, options: dict[str, Any], message: str) -> None:
    optimizer = FAMILIES[0].optimizers.SGD(0.1)
    with pytest.raises(world.ConfigurationError, match=message):
        hvd.DistributedOptimizer(optimizer, **options)
    assert not is_distributed(optimizer), "a refused optimizer is left as it was"
    with pytest.raises(world.ConfigurationError, match=message):
        hvd.DistributedGradientTape(tf.GradientTape(), **options)


@every_family
def test_an_optimizer_that_goes_round_the_hook(world: Any, family: Family) -> None:
    """Its class overrides the method that would reduce; training on would give each rank a model of its own."""
    if family.keras_name == "keras3":

        class Round(family.optimizers.SGD):  # type: ignore[name-defined,misc]
            def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
                self._backend_update_step(grads, trainable_variables, self.learning_rate)
    else:

        class Round(family.optimizers.SGD):  # type: ignore[name-defined,misc,no-redef]
            def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> None:
                for gradient, variable in grads_and_vars:
                    variable.assign_sub(gradient)

    optimizer = hvd.DistributedOptimizer(Round(0.1))
    messages = raised_everywhere(
        world.OptimizerError, lambda: optimizer.apply_gradients([(tf.ones([2]), tf.Variable([1.0, 1.0]))])
    )
    assert all("Round made an update without reducing the gradients" in message for message in messages)


@every_family
def test_an_optimizer_of_ones_own(world: Any, family: Family) -> None:
    """A subclass that adds to the method where hvdx reduces still works: its part runs on the reduced gradients."""
    hook = "_clip_gradients" if not family.legacy else "_transform_gradients"

    class Negated(family.optimizers.SGD):  # type: ignore[name-defined,misc]
        pass

    def negate(self: Any, gradients: Any) -> Any:
        if family.legacy:
            return [(-gradient, variable) for gradient, variable in gradients]
        return [-gradient for gradient in gradients]

    setattr(Negated, hook, negate)
    variable = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(Negated(1.0))
    together(lambda: optimizer.apply_gradients([(tf.constant([float(world.rank())]), variable)]))
    assert_equal_everywhere(arrays([variable]), [np.array([(world.size() - 1) / 2])], 0, 0)
