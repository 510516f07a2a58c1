"""`DistributedGradientTape`: everything a tf.GradientTape can do, with the mean of all ranks' gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import world as world_module
from hvdx.training import tape
from tests.training.support import (
    KERAS_3,
    Family,
    assert_equal_everywhere,
    assert_same_bits,
    every_keras,
    together,
)

pytestmark = pytest.mark.np(2)

W = np.arange(1, 7, dtype="float32").reshape(2, 3)


def _x(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=(4, 2)).astype("float32")


def _mean_gradient(world: Any) -> np.ndarray:
    """The mean over the ranks of the gradient of sum((x w)^2) with respect to w."""
    return np.mean([2 * _x(r).T @ (_x(r) @ W) for r in range(world.size())], 0)


def _variable(family: Family | None) -> Any:
    if family is not None and family.keras_name == "keras3":
        return family.keras.Variable(W, name="w")
    return tf.Variable(W, name="w")


@every_keras
@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("wrapped", ["before", "inside", "after"])
def test_gradient(world: Any, family: Family, how: str, wrapped: str) -> None:
    """Wrapped in the with statement, inside its block, or when it is over."""
    x, w = tf.constant(_x(world.rank())), _variable(family)

    def gradient() -> Any:
        if wrapped == "before":
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(tf.matmul(x, tf.convert_to_tensor(w)) ** 2)
            return tape.gradient(loss, [w])
        with tf.GradientTape() as local:
            tape = hvd.DistributedGradientTape(local) if wrapped == "inside" else None
            loss = tf.reduce_sum(tf.matmul(x, tf.convert_to_tensor(w)) ** 2)
        return (tape or hvd.DistributedGradientTape(local)).gradient(loss, [w])

    [result] = together(tf.function(gradient) if how == "graph" else gradient)
    assert_same_bits([result.numpy()], "gradients")
    assert_equal_everywhere([result.numpy()], [_mean_gradient(world)], 1e-5, 1e-5)


@pytest.mark.parametrize("family", [*KERAS_3, None], ids=str)
def test_the_structure_of_the_sources_is_kept(world: Any, family: Family | None) -> None:
    x = tf.constant(_x(world.rank()))
    w, unused, constant = _variable(family), tf.Variable([1.0], name="unused"), tf.constant(W)
    with tf.GradientTape() as local:
        local.watch(constant)
        loss = tf.reduce_sum(tf.matmul(x, tf.convert_to_tensor(w)) ** 2) + tf.reduce_sum(tf.matmul(x, constant) ** 2)
    tape = hvd.DistributedGradientTape(local)
    result = together(lambda: tape.gradient(loss, {"layers": [w, (unused,)], "watched": constant}))
    assert set(result) == {"layers", "watched"}
    assert isinstance(result["layers"], list)
    assert result["layers"][1] == (None,)
    both = [result["layers"][0].numpy(), result["watched"].numpy()]
    assert_equal_everywhere(both, [_mean_gradient(world)] * 2, 1e-5, 1e-5)


def test_a_search_that_was_asked_for_is_not_silently_left_out(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDX_AUTOTUNE", "1")
    said: list[str] = []
    monkeypatch.setattr(tape.log, "warning", lambda text, *parts: said.append(text % parts))
    tape._say_that_tapes_do_not_search.cache_clear()
    w = tf.Variable(W)
    for _ in range(2):
        with hvd.DistributedGradientTape(tf.GradientTape()) as watching:
            loss = tf.reduce_sum(tf.square(tf.constant(_x(world.rank())) @ w))
        watching.gradient(loss, w)
    wanted = "HVDX_AUTOTUNE has no effect on a DistributedGradientTape: a search needs hvd.DistributedOptimizer."
    assert said == ([wanted] if world.rank() == 0 else [])
    monkeypatch.undo()
    tape._say_that_tapes_do_not_search.cache_clear()


def test_a_single_source(world: Any) -> None:
    x, w = tf.constant(_x(world.rank())), tf.Variable(W)
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(tf.matmul(x, w) ** 2)
    result = together(lambda: tape.gradient(loss, w))
    assert_equal_everywhere([result.numpy()], [_mean_gradient(world)], 1e-5, 1e-5)


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_unconnected_gradients_and_output_gradients(world: Any, how: str) -> None:
    x, w, unused = tf.constant(_x(world.rank())), tf.Variable(W), tf.Variable([1.0, 2.0])

    def gradient() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.matmul(x, w) ** 2)
        return tape.gradient(
            loss, [w, unused], output_gradients=tf.constant(3.0), unconnected_gradients=tf.UnconnectedGradients.ZERO
        )

    result = together(tf.function(gradient) if how == "graph" else gradient)
    reference = [3 * _mean_gradient(world), np.zeros(2)]
    assert_equal_everywhere([value.numpy() for value in result], reference, 1e-5, 1e-5)


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_persistent_tape(world: Any, how: str) -> None:
    """Asked several times, inside and outside its with block."""
    x, w = tf.constant(_x(world.rank())), tf.Variable(W)

    def gradients() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
            loss = tf.reduce_sum(tf.matmul(x, w) ** 2)
            inside = tape.gradient(loss, w)
            double = loss * 2.0
        return inside, tape.gradient(loss, w), tape.gradient(double, w)

    results = together(tf.function(gradients) if how == "graph" else gradients)
    mean = _mean_gradient(world)
    assert_equal_everywhere([result.numpy() for result in results], [mean, mean, 2 * mean], 1e-5, 1e-5)


def test_what_else_a_tape_has(world: Any) -> None:
    """watch, watched_variables, stop_recording, reset and jacobian are the tape's own, and local."""
    x, w = tf.constant(_x(world.rank())), tf.Variable(W)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        tape.watch(x)
        y = tf.matmul(x, w)
        with tape.stop_recording():
            hidden = tf.reduce_sum(w)
    assert [variable.ref() for variable in tape.watched_variables()] == [w.ref()]
    assert together(lambda: tape.gradient(hidden, w)) is None
    assert tape.jacobian(y, x).shape == (4, 3, 4, 2)
    own = together(lambda: tape.gradient(tf.reduce_sum(y), x)) if world.size() == 1 else None
    if own is not None:
        np.testing.assert_allclose(own.numpy(), np.tile(W.sum(1), (4, 1)))


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("sparse_as_dense", [True, False, "auto"])
@pytest.mark.parametrize("length", [3, 40])
def test_sparse_gradients_equal_the_dense_mean(world: Any, how: str, sparse_as_dense: Any, length: int) -> None:
    """Short lists travel as rows under "auto", long ones as the dense tensor; indices repeat and overlap."""
    rows, n = 16, world.size()
    tokens = [np.random.default_rng(r).integers(0, rows, length) for r in range(n)]
    for own in tokens:
        own[:2] = 5
    table, mine = tf.Variable(tf.ones([rows, 4]), name="table"), tf.constant(tokens[world.rank()])

    def gradient() -> Any:
        with tf.GradientTape() as local:
            picked = tf.gather(table, mine) * tf.cast(tf.range(1, length + 1), tf.float32)[:, None]
        tape = hvd.DistributedGradientTape(local, sparse_as_dense=sparse_as_dense)
        return tape.gradient(picked, table)

    result = together(tf.function(gradient) if how == "graph" else gradient)
    dense = np.zeros((rows, 4))
    for own in tokens:
        np.add.at(dense, own, np.arange(1, length + 1)[:, None] / n)
    if n > 1:
        assert isinstance(result, tf.IndexedSlices) == (sparse_as_dense is not True)
    if isinstance(result, tf.IndexedSlices) and n > 1:
        touched = sorted(set(np.concatenate(tokens).tolist()))
        assert sorted(result.indices.numpy().tolist()) == touched, "the rows one process would touch, each once"
        assert_same_bits([result.indices.numpy(), result.values.numpy()], "slices")
    assert_equal_everywhere([tf.convert_to_tensor(result).numpy()], [dense], 1e-6, 1e-6)


@pytest.mark.np(2, plain=False)
def test_duplicates_are_summed_before_they_travel(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    communicator, sent = world_module.communicator(), []
    original = communicator.allgather
    monkeypatch.setattr(communicator, "allgather", lambda t, label: sent.append(t.shape[0]) or original(t, label))
    table = tf.Variable(tf.ones([100, 4]))
    with tf.GradientTape() as local:
        picked = tf.gather(table, [7, 7, 7, 7 + world.rank(), 3, 3])
    result = together(lambda: hvd.DistributedGradientTape(local, sparse_as_dense=False).gradient(picked, table))
    assert sent == [2 + world.rank()] * 2, "the indices and the rows that this rank touched"
    assert sorted(result.indices.numpy().tolist()) == [3, 7, *range(8, 7 + world.size())]


def test_a_loop_inside_a_function(world: Any) -> None:
    """The exchange runs in every turn of tf.while_loop."""
    w = tf.Variable(1.0)

    @tf.function
    def train(own: Any) -> None:
        for _ in tf.range(3):
            with tf.GradientTape() as tape:
                loss = own * w
            w.assign_sub(hvd.DistributedGradientTape(tape).gradient(loss, w))

    together(lambda: train(tf.constant(float(world.rank()))))
    mean = (world.size() - 1) / 2
    assert_equal_everywhere([w.numpy()], [np.asarray(1 - 3 * mean)], 1e-6, 0)
