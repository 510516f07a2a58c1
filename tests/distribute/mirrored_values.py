"""Scenes of the mirrored strategy without a model: values, variables and input on two devices of one or two ranks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import tensorflow as tf

import hvdx as hvd
from hvdx.distribute import strategy
from hvdx.errors import UnsupportedError
from tests.distribute.mirrored_checks import devices, parts_of, refused

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def play_replicas() -> None:
    """Every replica has a number of its own, on a device of its own."""
    mirrored, replicas = strategy("mirrored"), devices() * hvd.size()
    own = [hvd.rank() * devices() + index for index in range(devices())]
    assert isinstance(mirrored, tf.distribute.Strategy)
    assert mirrored.num_replicas_in_sync == replicas
    assert mirrored.extended.should_checkpoint == mirrored.extended.should_save_summary == (hvd.rank() == 0)

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        assert context.num_replicas_in_sync == replicas
        return context.replica_id_in_sync_group, tf.constant([1.0]) * 2

    for run in (mirrored.run, tf.function(mirrored.run)):
        ids, values = run(replica)
        assert [int(number) for number in mirrored.experimental_local_results(ids)] == own
        found = [value.device[-5:] for value in mirrored.experimental_local_results(values)]
        assert run is not mirrored.run or found == [f"CPU:{index}" for index in range(devices())]
    made = mirrored.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    assert list(mirrored.experimental_local_results(made)) == own
    words = mirrored.describe()
    assert f"replicas in sync: {replicas}" in words
    assert "devices of this rank: CPU:0, CPU:1" in words
    assert "ring between 2 devices" in words
    assert ("between ranks" in words) == (hvd.size() > 1)


def play_reductions() -> None:
    """Sums, means and gathered values, from outside of the replicas and from within."""
    mirrored, replicas = strategy("mirrored"), devices() * hvd.size()
    numbers = range(replicas)

    def distributed(value: Any) -> Any:
        make = mirrored.experimental_distribute_values_from_function
        return make(lambda context: tf.constant(value(context.replica_id_in_sync_group)))

    for dtype in (np.float32, np.int32, np.float16):
        given = [np.array([number, 2 * number], dtype) for number in numbers]
        for op, expected in ((SUM, sum(given)), (MEAN, np.array(sum(given) / replicas, dtype))):
            result = mirrored.reduce(op, distributed(given.__getitem__), axis=None)
            np.testing.assert_array_equal(result, expected)
            assert result.dtype == dtype
    rows = [np.full((number + 1, 2), number, np.float32) for number in numbers]
    joined = np.concatenate(rows)
    np.testing.assert_allclose(mirrored.reduce(SUM, distributed(rows.__getitem__), axis=0), joined.sum(0))
    np.testing.assert_allclose(mirrored.reduce(MEAN, distributed(rows.__getitem__), axis=0), joined.mean(0), 1e-6)
    np.testing.assert_array_equal(mirrored.gather(distributed(rows.__getitem__), axis=0), joined)
    columns = mirrored.gather(distributed(lambda number: rows[number].T.copy()), axis=1)
    np.testing.assert_array_equal(columns, joined.T)

    def replica(value: Any) -> Any:
        context = tf.distribute.get_replica_context()
        parts = {"a": value[:1], "b": [value[:1, 0] * 2]}
        slices = tf.IndexedSlices(value[:1], tf.constant([0]), tf.constant([3, 2]))
        summed = context.all_reduce(SUM, slices)
        return context.all_reduce(SUM, parts), context.all_gather(value, 0), tf.convert_to_tensor(summed)

    total = np.full((1, 2), sum(numbers), np.float32)
    for run in (mirrored.run, tf.function(mirrored.run)):
        parts, everything, sparse = run(replica, (distributed(rows.__getitem__),))
        for local in mirrored.experimental_local_results(parts):
            np.testing.assert_array_equal(local["a"], total)
            np.testing.assert_array_equal(local["b"][0], total[0, :1] * 2)
        for local in mirrored.experimental_local_results(everything):
            np.testing.assert_array_equal(local, joined)
        for local in mirrored.experimental_local_results(sparse):
            np.testing.assert_array_equal(local, np.concatenate([total, np.zeros((2, 2))]))


def play_variables() -> None:
    """Each kind of aggregation does what TensorFlow says, over all devices and ranks; a new one is rank 0's."""
    mirrored, replicas = strategy("mirrored"), devices() * hvd.size()
    kinds = tf.VariableAggregation
    with mirrored.scope():
        first = tf.Variable([float(hvd.rank()), 1.0])
        mean = tf.Variable(0.0, aggregation=kinds.MEAN)
        total = tf.Variable(0.0, aggregation=kinds.SUM)
        one = tf.Variable(0.0, aggregation=kinds.ONLY_FIRST_REPLICA)
        counted = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=kinds.SUM)

    @tf.function
    def step() -> None:
        def replica() -> None:
            number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            mean.assign(number)
            total.assign_add(number)
            one.assign(tf.where(number >= devices(), number - hvd.rank() * devices(), number))
            counted.assign_add(number + 1)

        mirrored.run(replica)

    step()
    step()
    numbers = range(replicas)
    expected = [[0.0, 1.0], sum(numbers) / replicas, 2 * sum(numbers), 0.0]
    for variable, value in zip((first, mean, total, one), expected, strict=True):
        for part in parts_of(variable):
            np.testing.assert_array_equal(part, value)
    assert counted.numpy() == 2 * sum(number + 1 for number in numbers)
    counted.assign(0.0)
    assert counted.numpy() == 0


def play_input() -> None:
    """A global batch is cut among all replicas, also the last one, which is smaller; a function gets the context."""
    mirrored, replicas = strategy("mirrored"), devices() * hvd.size()
    dataset = tf.data.Dataset.range(6 * replicas + 3).batch(2 * replicas)
    seen = []
    for batch in mirrored.experimental_distribute_dataset(dataset):
        local = [value.numpy().tolist() for value in mirrored.experimental_local_results(batch)]
        seen.append(sorted(chain.from_iterable(chain.from_iterable(hvd.allgather_object(local)))))
    expected = [batch.numpy().tolist() for batch in dataset]
    assert sorted(chain.from_iterable(seen)) == sorted(chain.from_iterable(expected)), seen
    assert seen[:3] == expected[:3], seen

    def input_fn(context: Any) -> Any:
        assert (context.num_input_pipelines, context.input_pipeline_id) == (hvd.size(), hvd.rank())
        assert context.num_replicas_in_sync == replicas
        own = tf.data.Dataset.range(4 * replicas).shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(context.get_per_replica_batch_size(2 * replicas))

    local = []
    for batch in mirrored.distribute_datasets_from_function(input_fn):
        parts = mirrored.experimental_local_results(batch)
        assert [len(part) for part in parts] == [2] * devices()
        local += [number for part in parts for number in part.numpy().tolist()]
    assert sorted(chain.from_iterable(hvd.allgather_object(local))) == list(range(4 * replicas))


def play_generators() -> None:
    """A `tf.random.Generator` of the scope draws other numbers in each replica."""
    mirrored = strategy("mirrored")
    with mirrored.scope():
        generator = tf.random.Generator.from_seed(3)
    drawn = mirrored.experimental_local_results(tf.function(mirrored.run)(lambda: generator.normal([4])))
    everywhere = hvd.allgather_object([value.numpy().tobytes() for value in drawn])
    assert len(set(chain.from_iterable(everywhere))) == devices() * hvd.size()


def play_tape() -> None:
    """A DistributedGradientTape's gradients are over all replicas: dense, sparse, and one that is None everywhere."""
    mirrored, replicas = strategy("mirrored"), devices() * hvd.size()
    with mirrored.scope():
        kernel, rows, unused = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 2])), tf.Variable(1.0)

    def gradients(op: str) -> Any:
        factor = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group + 1, tf.float32)
        with hvd.DistributedGradientTape(tf.GradientTape(), op) as tape:
            loss = factor * (tf.reduce_sum(kernel) + tf.reduce_sum(tf.gather(rows, [1, 1])))
        found = tape.gradient(loss, {"kernel": kernel, "rows": rows, "unused": unused})
        assert found["unused"] is None
        assert isinstance(found["rows"], tf.IndexedSlices)
        return found["kernel"], tf.convert_to_tensor(found["rows"])

    total = sum(range(1, replicas + 1))
    for run in (mirrored.run, tf.function(mirrored.run)):
        for op, expected in (("sum", total), ("average", total / replicas)):
            dense, sparse = run(gradients, (op,))
            for part in mirrored.experimental_local_results(dense):
                np.testing.assert_allclose(part, [expected] * 2)
            for part in mirrored.experimental_local_results(sparse):
                np.testing.assert_allclose(part, np.outer([0, 2, 0, 0], [expected] * 2))
    assert "op=MAX" in refused(UnsupportedError, lambda: mirrored.run(gradients, ("max",)))
