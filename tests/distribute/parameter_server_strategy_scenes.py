"""What workers do in the tests of `strategy("parameter_server")`: each scene is played by all workers of a job."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.distribute import strategy
from hvdx.keras_api import inner_optimizer
from tests.distribute.parameter_server_recipes import PIECE_BYTES, cases, compare, name_of
from tests.training.models import BATCH, dense, linear_data
from tests.training.recipes import Recipe, train_on_batches
from tests.training.support import FAMILIES, LEGACY, Family, arrays, optimizer_arrays, part, policy, union


def outcome(play: Callable[[], None]) -> str:
    """Return "" where it went well, else the traceback."""
    try:
        play()
    except (Exception, pytest.fail.Exception):  # the second is none of the first
        return traceback.format_exc()
    return ""


# -- the yardstick -----------------------------------------------------------------------------------------------------


def play_recipes(folder: Path) -> dict[str, str]:
    """All recipes with the model built, compiled and trained under the strategy, each to its own outcome."""
    return {name_of(recipe, family): outcome(lambda r=recipe, f=family: _recipe(r, f)) for recipe, family in cases()}


def _recipe(recipe: Recipe, family: Family) -> None:
    made = strategy("parameter_server", piece_bytes=PIECE_BYTES)
    data = recipe.data(hvd.size())
    # everything cuts the global batch, but for `train_on_batch` of Keras 3, which takes what each worker gives it
    local = recipe.train is train_on_batches and family.keras_name == "keras3"
    own = (part(data, hvd.rank()), BATCH) if local else (union(data), BATCH * hvd.size())
    with policy(family.keras, recipe.policy):
        with made.scope():
            # the workers' own first values differ: those of worker 0 count
            model = _compiled(recipe, family, lambda optimizer: optimizer, 7 + hvd.rank())
        recipe.train(model, *own)
        inner_optimizer(model.optimizer).finalize_variable_values(model.trainable_variables)
        check_equal_on_workers(model)
        assert {one["pushes"] for one in made.counters(model)} != {0}
        if hvd.rank():
            return
        reference = _compiled(recipe, family, recipe.reference, 7)
        recipe.train(reference, union(data), BATCH * hvd.size())
        inner_optimizer(reference.optimizer).finalize_variable_values(reference.trainable_variables)
    compare(arrays(model.weights), arrays(reference.weights), recipe.rtol, recipe.atol, "weights")
    slots = optimizer_arrays(model.optimizer), optimizer_arrays(reference.optimizer)
    compare(*slots, recipe.rtol, recipe.atol, "optimizer variables")


def _compiled(recipe: Recipe, family: Family, wrap: Any, seed: int) -> Any:
    family.keras.utils.set_random_seed(seed)
    model = recipe.model(family.keras)
    if recipe.seeds_differ:
        model(recipe.data(1)[0][0, 0, :1])
    model.compile(recipe.optimizer(family, wrap), **recipe.compile)
    return model


def check_equal_on_workers(model: Any) -> None:
    """Check that all workers have the same weights; collective."""
    digests = hvd.allgather_object([value.tobytes() for value in arrays(model.weights)])
    assert all(digest == digests[0] for digest in digests), "the workers' weights differ"


def play_loops(folder: Path) -> dict[str, str]:
    """A loop of one's own with every Keras."""
    return {f"loops-{family}": outcome(lambda f=family: _loop(f)) for family in FAMILIES}


def play_loop(folder: Path) -> None:
    """The same with one of them, where it matters how the job was started."""
    _loop(FAMILIES[0])


def _loop(family: Family) -> None:
    made = strategy("parameter_server", piece_bytes=PIECE_BYTES)
    data = union(linear_data(hvd.size()))
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(BATCH * hvd.size())
    results = []
    for current, batches in ((made, made.experimental_distribute_dataset(dataset)), (None, dataset)):
        family.keras.utils.set_random_seed(7)
        with (current or tf.distribute.get_strategy()).scope():
            model = dense(family.keras)
            optimizer = family.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.05)
            optimizer.build(model.trainable_variables)
        results.append((model, optimizer, _losses(current, model, optimizer, batches)))
        if current is not None:
            made.pull(optimizer)
    (model, optimizer, losses), (reference, slots, expected) = results
    np.testing.assert_allclose(losses, expected, 1e-5)
    compare(arrays(model.weights), arrays(reference.weights), 1e-5, 1e-6, "weights")
    compare(optimizer_arrays(optimizer), optimizer_arrays(slots), 1e-5, 1e-6, "optimizer variables")


def play_refused(folder: Path) -> dict[str, str]:
    """An optimizer that the servers do not run, or that reduces by itself, is refused in the first step."""
    return {f"refused-{family}": outcome(lambda f=family: _refused(f)) for family in FAMILIES + LEGACY}


def _refused(family: Family) -> None:
    made = strategy("parameter_server")
    with made.scope():
        model = dense(family.keras)
        optimizer = family.optimizers.SGD(0.1)
        model.compile(optimizer if family.legacy else hvd.DistributedOptimizer(optimizer), "mse")
    words = "does not run legacy optimizers" if family.legacy else "This SGD has been wrapped already"
    with pytest.raises(Exception, match=words):
        model.fit(*union(linear_data(hvd.size())), verbose=0)


def _losses(made: Any, model: Any, optimizer: Any, batches: Any) -> list[float]:
    """Train one epoch; return each step's loss of all workers."""
    replicas = 1 if made is None else made.num_replicas_in_sync

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / replicas
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def run(*batch: Any) -> Any:
        return step(*batch) if made is None else made.reduce("SUM", made.run(step, batch), axis=None)

    return [float(run(*batch)) for batch in batches]


# -- the workers as ranks ----------------------------------------------------------------------------------------------


def play_world(folder: Path) -> None:
    """Workers are the ranks, and everything that ranks do together goes through the servers."""
    rank, size = hvd.rank(), hvd.size()
    assert (size, hvd.local_size(), hvd.local_rank(), hvd.is_homogeneous()) == (2, 2, rank, True)
    for dtype in (tf.float32, tf.bfloat16, tf.float16, tf.int32):
        own = tf.cast(tf.range(4) + rank, dtype)
        assert hvd.push_pull(own).numpy().tolist() == tf.cast([0.5, 1.5, 2.5, 3.5], dtype).numpy().tolist()
        assert hvd.push_pull(own, average=False).numpy().tolist() == [1, 3, 5, 7]
    long = tf.fill([40_000], 1.0 + rank)  # both servers take a part of it
    np.testing.assert_array_equal(tf.function(hvd.push_pull)(long), np.full(40_000, 1.5))
    assert hvd.allreduce(tf.constant([rank == 0, True]), hvd.Min).numpy().tolist() == [False, True]
    assert hvd.allgather(tf.fill([rank + 1, 2], rank)).numpy().tolist() == [[0, 0], [1, 1], [1, 1]]
    assert hvd.allgather(tf.zeros([0, 2])).shape == (0, 2)
    assert hvd.broadcast(tf.constant([rank, 7]), 1).numpy().tolist() == [1, 7]
    assert hvd.broadcast_object({"from": rank}, 1) == {"from": 1}
    hvd.barrier()
    with pytest.raises(hvd.UnsupportedError, match="Workers of a job with parameter servers send no messages"):
        hvd.send(long, 1 - rank)
    for options, sentence in (
        ({"updates": "sync"}, "updates is one of synchronous, asynchronous. Received: 'sync'"),
        ({"staleness": 2}, "staleness and gather are options of the asynchronous mode"),
        ({"updates": "asynchronous", "gather": 3}, "gather=3 gradients, and there are 2"),
        ({"backend": "torch"}, "backend= is hvdx or tensorflow. Received: 'torch'"),
        ({"devices": ["CPU:0", "CPU:1"]}, "has one device a worker"),
        ({"backend": "tensorflow"}, "has already been joined with the servers communicator. Leave out hvd.init()"),
        ({"backend": "tensorflow", "gather": 2}, 'Received: gather=2, with backend="tensorflow"'),
    ):
        with pytest.raises(hvd.ConfigurationError, match=re.escape(sentence)):
            strategy("parameter_server", **options)
    with pytest.raises(
        hvd.ConfigurationError, match=r"\"multi_worker\"\) has no parameter servers, but hvdxrun says 2"
    ):
        strategy("multi_worker")
    with pytest.raises(hvd.MismatchError, match=r"rank 0: allreduce .* 2 float32.*\n  rank 1: allreduce .* 3 float32"):
        hvd.allreduce(tf.zeros([2 + rank]))


def play_horovod(folder: Path) -> dict[str, str]:
    """A program for ranks, which knows of no strategy, with callbacks: as it does without servers."""
    return {f"horovod-{family}": outcome(lambda f=family: _horovod(f)) for family in FAMILIES}


def _horovod(family: Family) -> None:
    family.keras.utils.set_random_seed(hvd.rank())
    model = dense(family.keras)
    model.compile(hvd.DistributedOptimizer(family.optimizers.SGD(0.1)), "mse", metrics=["mae"])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    data = part(linear_data(hvd.size()), hvd.rank())
    history = model.fit(*data, BATCH, epochs=2, verbose=0, shuffle=False, callbacks=callbacks).history
    check_equal_on_workers(model)
    family.keras.utils.set_random_seed(0)
    reference = dense(family.keras)
    reference.compile(family.optimizers.SGD(0.1), "mse", metrics=["mae"])
    expected = reference.fit(
        *union(linear_data(hvd.size())), BATCH * hvd.size(), epochs=2, verbose=0, shuffle=False
    ).history
    compare(arrays(model.weights), arrays(reference.weights), 1e-5, 1e-6, "weights")
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, 1e-5, err_msg=name)
