"""The `multi_worker` strategy as TensorFlow's own loops use it: run, reduce, gather, datasets, variables, contexts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.distribute import strategy
from tests.training.models import BATCH, linear_data
from tests.training.support import (
    FAMILIES,
    Family,
    assert_equal_everywhere,
    gathered,
    raised_everywhere,
    together,
    union,
)

pytestmark = pytest.mark.np(2, 3)
AUTO = tf.data.experimental.AutoShardPolicy


def _rows(dataset: Any) -> list[list[list[int]]]:
    """Return what each rank gets, one list a step; collective."""
    return gathered([np.asarray(getattr(batch, "values", [batch])[0]).tolist() for batch in dataset])


def _joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def _with_policy(dataset: Any, policy: Any) -> Any:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def test_says_who_takes_part(world: Any) -> None:
    made = strategy("multi_worker_mirrored")
    extended, resolver = made.extended, made.cluster_resolver
    assert isinstance(made, tf.distribute.MultiWorkerMirroredStrategy)
    assert made.num_replicas_in_sync == world.size()
    assert (extended.should_checkpoint, extended.should_save_summary) == (world.rank() == 0,) * 2
    assert (resolver.task_type, resolver.task_id) == ("worker", world.rank())
    assert len(resolver.cluster_spec().as_dict()["worker"]) == world.size()
    text = made.describe()
    for part in (
        f"replicas in sync: {world.size()}",
        f"this is rank {world.rank()}",
        "CPU:0",
        f"hvdx {hvd.__version__}",
    ):
        assert part in text
    assert (hvd.size() > 1) == (f"{hvd.world.communicator().name} between ranks" in text)


def test_values_are_reduced_and_gathered(world: Any) -> None:
    made, rank, size = strategy("multi_worker"), world.rank(), world.size()

    def step(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        assert context.num_replicas_in_sync == size
        assert not tf.distribute.in_cross_replica_context()
        return {
            "place": context.replica_id_in_sync_group,
            "own": x * (rank + 1.0),
            "sum": context.all_reduce("SUM", x * (rank + 1.0)),
            "all": context.all_gather(tf.fill([rank + 1, 2], rank), axis=0),
            "merged": context.merge_call(lambda s, value: s.reduce("MEAN", value, axis=None), args=(x + rank,)),
        }

    def check() -> None:
        total = size * (size + 1) / 2
        found: Any = tf.function(made.run)(step, args=(tf.constant([1.0, 2.0]),))
        assert int(found["place"]) == rank
        np.testing.assert_allclose(found["sum"], [total, 2 * total])
        np.testing.assert_allclose(made.reduce("SUM", found["own"], axis=None), [total, 2 * total])
        np.testing.assert_allclose(made.reduce("SUM", found["own"], axis=0), 3 * total)
        np.testing.assert_allclose(made.reduce("MEAN", found["own"], axis=0), 1.5 * total / size)
        np.testing.assert_array_equal(found["all"], [[r, r] for r in range(size) for _ in range(r + 1)])
        np.testing.assert_allclose(found["merged"], np.array([1.0, 2.0]) + (size - 1) / 2)
        np.testing.assert_array_equal(made.gather(tf.fill([2, rank + 1], rank), axis=1)[0].numpy(), [
            r for r in range(size) for _ in range(r + 1)
        ])  # fmt: skip
        value = made.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        assert made.experimental_local_results(value) == (rank,)
        assert tf.distribute.in_cross_replica_context() is False  # outside of the scope: the default strategy
        with made.scope():
            assert tf.distribute.in_cross_replica_context()
            assert tf.distribute.get_strategy() is made

    together(check)


def test_a_dataset_is_cut_as_the_policies_say(world: Any, tmp_path: Any) -> None:
    made, size = strategy("multi_worker"), world.size()
    numbers = tf.data.Dataset.range(7 * size).batch(2 * size)  # the last batch is smaller
    cut = _rows(made.experimental_distribute_dataset(_with_policy(numbers, AUTO.DATA)))
    whole = [batch.tolist() for batch in numbers.as_numpy_iterator()]
    assert [_joined(rank[step] for rank in cut) for step in range(len(whole))] == whole
    assert all(len(rank[0]) == 2 for rank in cut)
    kept = _rows(made.experimental_distribute_dataset(_with_policy(numbers, AUTO.OFF)))
    assert all(_joined(rank) == list(range(7 * size)) for rank in kept)

    folder = hvd.broadcast_object(str(tmp_path), 0)
    for file in range(size) if world.rank() == 0 else ():
        with tf.io.TFRecordWriter(f"{folder}/{file}.records") as writer:
            for row in range(4):
                writer.write(str(10 * file + row).encode())
    hvd.barrier()
    records = tf.data.TFRecordDataset([f"{folder}/{file}.records" for file in range(size)])
    by_file = _with_policy(records.map(lambda text: tf.strings.to_number(text, tf.int64)).batch(size), AUTO.FILE)
    found = _rows(made.experimental_distribute_dataset(by_file))
    assert [sorted(_joined(rank)) for rank in found] == [[10 * file + row for row in range(4)] for file in range(size)]


def test_a_dataset_function_is_told_its_part(world: Any) -> None:
    made, size = strategy("multi_worker"), world.size()

    def of(context: Any) -> Any:
        assert context.num_replicas_in_sync == size
        numbers = tf.data.Dataset.range(4 * size).shard(context.num_input_pipelines, context.input_pipeline_id)
        return numbers.batch(context.get_per_replica_batch_size(2 * size))

    found = _rows(made.distribute_datasets_from_function(of))
    assert [_joined(rank) for rank in found] == [list(range(rank, 4 * size, size)) for rank in range(size)]
    option = tf.distribute.InputOptions(
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA, experimental_fetch_to_device=False
    )
    with pytest.raises(hvd.UnsupportedError, match="PER_REPLICA"):
        made.distribute_datasets_from_function(of, option)


def test_variables_start_equal_and_are_restored(world: Any, tmp_path: Any) -> None:
    made = strategy("multi_worker")
    with made.scope():
        variable = tf.Variable([1.0 + world.rank(), 2.0])
        counted = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def check() -> None:
        np.testing.assert_array_equal(variable, [1.0, 2.0])
        tf.function(made.run)(lambda: counted.assign_add(world.rank() + 1.0))
        assert float(counted.read_value()) == world.size() * (world.size() + 1) / 2
        checkpoint = tf.train.Checkpoint(variable=variable, counted=counted)
        path = checkpoint.save(str(tmp_path / "own"))  # by every rank: what is counted is summed
        variable.assign([5.0, 5.0])
        tf.function(made.run)(lambda: counted.assign(9.0))
        checkpoint.restore(path).assert_consumed()
        np.testing.assert_array_equal(variable, [1.0, 2.0])
        assert float(counted.read_value()) == world.size() * (world.size() + 1) / 2

    together(check)


def test_variables_with_an_aggregation_are_reduced_as_they_are_assigned(world: Any) -> None:
    made, rank, size = strategy("multi_worker"), world.rank(), world.size()
    kinds = {"mean": tf.VariableAggregation.MEAN, "sum": tf.VariableAggregation.SUM}
    with made.scope():
        variables = {name: tf.Variable(rank + 1.0, aggregation=kind) for name, kind in kinds.items()}

    def check() -> None:
        assert [float(variable.numpy()) for variable in variables.values()] == [1.0, 1.0]
        tf.function(made.run)(lambda: [variable.assign(rank + 2.0) for variable in variables.values()])
        total = sum(range(2, size + 2))
        assert [float(variable.numpy()) for variable in variables.values()] == [total / size, total]

    together(check)


def test_a_sum_over_an_axis_that_is_not_there_is_an_error(world: Any) -> None:
    made = strategy("multi_worker")
    for message in raised_everywhere(Exception, lambda: made.reduce("SUM", tf.constant(1.0), axis=0)):
        assert message
    if world.size() > 1:
        for message in raised_everywhere(hvd.ConfigurationError, lambda: made.gather(tf.zeros([2, 2]), axis=-1)):
            assert "from 0 to 1" in message
            assert "Received: -1" in message


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_an_update_after_fit_outside_of_the_strategy_is_the_mean(world: Any, family: Family) -> None:
    x, y = union(linear_data(world.size()))
    with strategy("multi_worker").scope():
        model = family.keras.Sequential([family.keras.layers.Dense(3)])
        model.build((None, 5))
        model.compile(hvd.DistributedOptimizer(family.optimizers.SGD(0.1)), loss="mse")
        bare = family.keras.Sequential([family.keras.layers.Dense(3)])
        bare.build((None, 5))
        bare.compile(family.optimizers.SGD(0.1), loss="mse")

    def check() -> None:
        for one in (model, bare) if family.keras_name == "keras3" else (model,):
            one.fit(x, y, BATCH * world.size(), epochs=1, verbose=0)
            before = one.get_weights()
            one.optimizer.apply_gradients([(tf.ones(v.shape) * world.rank(), v) for v in one.trainable_variables])
            for new, old in zip(one.get_weights(), before, strict=True):
                np.testing.assert_allclose(new, old - 0.1 * (world.size() - 1) / 2, rtol=1e-5, atol=1e-6)

    together(check)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_model_with_batch_norm_and_a_last_batch_that_is_too_small(world: Any, family: Family) -> None:
    """One row more than all batches: a rank gets none, and evaluate, predict and the statistics stay exact."""
    keras = family.keras
    rng = np.random.default_rng(4)
    x = rng.normal(size=(4 * BATCH * world.size() + 1, 5)).astype("float32")
    y = x.sum(-1, keepdims=True)
    batch = BATCH * world.size()

    def build() -> Any:
        keras.utils.set_random_seed(3)
        layers = keras.layers
        model = keras.Sequential([layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)])
        model.build((None, 5))
        model.compile(keras.optimizers.SGD(0.01), loss="mse", metrics=["mae"])
        return model

    def check() -> list[Any]:
        with strategy("multi_worker").scope():
            model = build()
        reference = build()
        found = model.evaluate(x, y, batch_size=batch, verbose=0)
        np.testing.assert_allclose(found, reference.evaluate(x, y, batch_size=batch, verbose=0), rtol=1e-5)
        predicted = model.predict(x, batch_size=batch, verbose=0)
        np.testing.assert_allclose(predicted, reference.predict(x, batch_size=batch, verbose=0), rtol=1e-5, atol=1e-6)
        history = model.fit(x, y, batch_size=batch, epochs=2, verbose=0, validation_data=(x, y)).history
        assert np.isfinite(list(history.values())).all(), history
        return [sorted(history.items()), *(np.asarray(weight).tolist() for weight in model.get_weights())]

    found = gathered(together(check))
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_synchronised_batch_norm_equals_one_process(world: Any, family: Family) -> None:
    keras = family.keras
    x, y = union(linear_data(world.size()))
    weights = []
    for scope in (strategy("multi_worker").scope(), tf.distribute.get_strategy().scope()):
        keras.utils.set_random_seed(3)
        with scope:
            norm = keras.layers.BatchNormalization(synchronized=True)
            model = keras.Sequential([keras.layers.Dense(4), norm, keras.layers.Dense(3)])
            model.build((None, 5))
            model.compile(keras.optimizers.SGD(0.05), loss="mse")
        together(lambda m=model: m.fit(x, y, BATCH * world.size(), epochs=1, verbose=0, shuffle=False))
        weights.append(model.get_weights())
    assert_equal_everywhere(*weights, 1e-4, 1e-5)
