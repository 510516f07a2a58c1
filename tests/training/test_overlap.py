"""Buckets that leave while gradients are still computed, and the search for the fastest of them."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.training import autotune
from hvdx.training.autotune import Tuner
from hvdx.training.reducer import GradientReducer
from tests.conftest import installed_kerases, load_keras

pytestmark = pytest.mark.np(2, plain=False)


def reduce_in_graph(reducer: GradientReducer, gradients: Any, variables: list[tf.Variable]) -> list[Any]:
    return tf.function(lambda: reducer.reduce(gradients(), variables))()


@pytest.mark.np(2, plain=False, comm=["shared_memory", "mpi", "tensorflow"])  # Horovod's thread sends when it likes
def test_the_last_layers_gradients_travel_before_the_first_ones_are_there(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes the first layer's gradient sees that the last layer's has been reduced."""
    monkeypatch.setenv("HVDX_OVERLAP", "1")
    sent = threading.Event()
    communicator = world.world.communicator()
    original = communicator.grouped_allreduce
    calls: list[tuple[str, ...]] = []

    def spy(tensors: Any, op: Any, label: Any, threshold: int) -> list[Any]:
        calls.append(label.names)
        results = original(tensors, op, label, threshold)
        if len(calls) == 1:
            with tf.control_dependencies(results):
                told = tf.numpy_function(lambda: (sent.set(), np.int32(0))[1], [], tf.int32)
            with tf.control_dependencies([told]):
                return [tf.identity(result) for result in results]
        return results

    monkeypatch.setattr(communicator, "grouped_allreduce", spy)

    def link(value: np.ndarray) -> np.ndarray:
        time.sleep(0.01)
        return value

    def late(value: np.ndarray) -> np.ndarray:
        return np.full(400_000, value + float(sent.is_set()), np.float32)

    def gradients() -> list[tf.Tensor]:
        # through layers that take a while; of a variable, since TensorFlow would work out a constant beforehand
        backprop = variables[0][0]
        for _ in range(20):
            backprop = tf.numpy_function(link, [backprop], tf.float32, stateful=False)
        backprop.set_shape([])
        first = tf.numpy_function(late, [backprop], tf.float32, stateful=False)
        first.set_shape([400_000])
        return [first, tf.fill([300_000], float(hvd.rank()))]

    variables = [tf.Variable(tf.zeros([400_000]), name="first"), tf.Variable(tf.zeros([300_000]), name="last")]
    first, last = reduce_in_graph(GradientReducer(), gradients, variables)
    assert [len(names) for names in calls] == [1, 1]
    assert "last" in calls[0][0]
    np.testing.assert_array_equal(first, np.ones(400_000))
    np.testing.assert_allclose(last, np.full(300_000, (world.size() - 1) / 2))


def test_on_one_host_all_gradients_travel_in_one_operation(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = world.world.communicator()
    calls: list[int] = []
    original = communicator.grouped_allreduce
    monkeypatch.setattr(
        communicator,
        "grouped_allreduce",
        lambda tensors, *rest: (calls.append(len(tensors)), original(tensors, *rest))[1],
    )
    variables = [tf.Variable(tf.zeros([400_000]), name=name) for name in "ab"]
    reduce_in_graph(GradientReducer(), lambda: [tf.ones([400_000]) * (hvd.rank() + 1.0)] * 2, variables)
    assert calls == [2]


def test_a_gradient_missing_on_one_rank_is_named_with_buckets_too(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDX_OVERLAP", "1")
    variables = [tf.Variable(tf.zeros([400_000]), name=name) for name in ("one", "two", "three")]

    def gradients() -> list[Any]:
        return [tf.ones([400_000]), None if hvd.rank() else tf.ones([400_000]), tf.ones([400_000])]

    with pytest.raises((hvd.GradientError, tf.errors.OpError), match=r"two.*no gradient on rank 1"):
        reduce_in_graph(GradientReducer(), gradients, variables)


@pytest.mark.parametrize("name", installed_kerases())
def test_the_search_ends_alike_everywhere_and_trains_as_without(
    world: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Weights after the search and some steps more equal those of the plain optimizer; all ranks chose the same."""
    monkeypatch.setattr(autotune, "BUCKETS", (0, 1 << 10, 1 << 12))
    keras = load_keras(name)

    def train(search: bool) -> tuple[list[np.ndarray], Any]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.layers.Dense(40, "tanh"), keras.layers.Dense(40, "tanh"), keras.layers.Dense(1)]
        )
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), autotune=search)
        model.compile(optimizer, "mse")
        random = np.random.default_rng(world.rank())
        x = random.standard_normal((8 * 60, 30)).astype("f")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(x, x.sum(1), batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
        return [np.asarray(value) for value in model.get_weights()], optimizer.hvdx_reducer.tuner

    weights, tuner = train(search=True)
    plain, nothing = train(search=False)
    assert nothing is None
    for mine, wanted in zip(weights, plain, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)
    reports = world.allgather_object(tuner.report)
    assert all(report == reports[0] for report in reports)
    algorithms = world.world.communicator().algorithms
    tried = set(reports[0]["seconds"])
    assert len(tried) == (len(algorithms) + 2 if algorithms else 3)
    assert reports[0]["chosen"] in tried


def test_ranks_that_trace_at_different_times_try_the_same(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and large gradients through one search, and rank 0 traces the large ones once more in between."""
    monkeypatch.setattr(autotune, "BUCKETS", (0, 1 << 12, 1 << 14))
    tuner = Tuner()
    reducer = GradientReducer(tuner=tuner)
    sets = {count: [tf.Variable(tf.zeros([100, 30]), name=f"v{i}") for i in range(count)] for count in (1, 6)}

    @tf.function
    def step(count: int, rows: int) -> list[Any]:
        values = [tf.ones([100, 30]) * (hvd.rank() + 1.0) + tf.cast(rows, tf.float32) for _ in range(count)]
        return reducer.reduce(values, sets[count])

    algorithms = world.world.communicator().algorithms
    for number in range((len(algorithms) + 3) * (autotune.UPDATES + 1) // 2 + 4):
        for count in sets:
            results = step(count, number % 2 if hvd.rank() == 0 and count == 6 else 0)
            assert len(results) == count
    reports = world.allgather_object(tuner.report)
    assert reports[0]
    assert all(report == reports[0] for report in reports)


@pytest.mark.parametrize("value", ["yes", 2, 0.5])
def test_what_is_no_answer_is_refused(world: Any, value: Any) -> None:
    keras = load_keras(installed_kerases()[0])
    with pytest.raises(hvd.ConfigurationError, match="autotune is True, False or None"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), autotune=value)
