"""What hvd.shard refuses, on one rank or several, and that its sentences say what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd

pytestmark = pytest.mark.usefixtures("world")
X = np.zeros((8, 2), np.float32)
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no batch size": (X, {}, r"needs batch_size.*hvd\.shard\(\(x, y\), batch_size=32\)"),
    "targets as batch size": (X, {"batch_size": np.zeros(8)}, r"batch_size is an integer.*hvd\.shard\(\(x, y\)"),
    "batch size 0": (X, {"batch_size": 0}, "batch_size is an integer, 1 or more. Received: 0"),
    "batch size True": (X, {"batch_size": True}, "batch_size is an integer, 1 or more. Received: True"),
    "seed": (X, {"batch_size": 2, "seed": -1}, "seed is an integer, 0 or more. Received: -1"),
    "epoch": (X, {"batch_size": 2, "initial_epoch": "3"}, "initial_epoch is an integer"),
    "buffer": (X, {"batch_size": 2, "buffer_size": 0}, "buffer_size is an integer, 1 or more"),
    "shuffle": (X, {"batch_size": 2, "shuffle": "yes"}, "shuffle is True or False. Received: 'yes'"),
    "lengths": ((X, X[:7]), {"batch_size": 2}, r"different numbers of samples: data\[0\] 8, data\[1\] 7"),
    "lengths in dicts": (
        {"a": X, "b": {"c": X[:7]}}, {"batch_size": 2}, r"data\['a'\] 8, data\['b'\]\['c'\] 7",
    ),
    "list of numbers": ([1, 2, 3], {"batch_size": 2}, r"np\.array.*data\[0\] has no first dimension"),
    "None": ((X, None), {"batch_size": 2}, r"data\[1\] has no first dimension. Received: None"),
    "nothing": ((), {"batch_size": 2}, "got no array"),
    "dtype": (np.zeros(8, "datetime64[s]"), {"batch_size": 2}, r"no dtype for data, which is datetime64\[s\]"),
    "ragged": (tf.ragged.constant([[1], [2, 3]]), {"batch_size": 2}, "RaggedTensor. Pass it as a dataset"),
    "no samples": (X[:0], {"batch_size": 2}, r"got 0 sample\(s\)"),
    "samples without batch size": (
        tf.data.Dataset.range(8), {}, r"single samples and no batch_size.*hvd\.shard\(dataset, batch_size",
    ),
    "batched twice": (tf.data.Dataset.range(8).batch(2).prefetch(1), {"batch_size": 2}, "already batched.*before"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str) -> None:
    data, options, words = CASES[case]
    with pytest.raises(hvd.ConfigurationError, match=words):
        hvd.shard(data, **options)


def test_before_init() -> None:
    hvd.shutdown()
    try:
        with pytest.raises(hvd.NotInitializedError):
            hvd.shard(X, 2)
    finally:
        hvd.init("single")


def test_inside_a_function() -> None:
    @tf.function(autograph=False)  # AutoGraph puts an error of its own around every error
    def step() -> Any:
        return hvd.shard(tf.data.Dataset.range(8), 2).reduce(0, lambda total, _: total + 1)

    with pytest.raises(hvd.ConfigurationError, match=r"outside tf\.function"):
        step()


@pytest.mark.np(2, 3, plain=False)
def test_orders_that_differ_between_ranks() -> None:
    tf.random.set_seed(None)
    numbers = tf.data.Dataset.range(12)
    with pytest.raises(hvd.ConfigurationError, match=r"already shuffled, without a seed.*Shard first"):
        hvd.shard(numbers.shuffle(12).map(lambda v: v + 1), 2)
    with pytest.raises(hvd.ConfigurationError, match=r"deterministic=False \(ParallelMapDataset\)"):
        hvd.shard(numbers.map(lambda v: v, num_parallel_calls=2, deterministic=False), 2)
    tf.random.set_seed(1 + hvd.rank())
    by_global_seed = numbers.shuffle(12)
    with pytest.raises(hvd.ConfigurationError, match=r"seed of the dataset's own .shuffle\(\) differs.*rank 0 \[\[1, "):
        hvd.shard(by_global_seed, 2)
    tf.random.set_seed(1)
    seeded = hvd.shard(numbers.shuffle(12, seed=1), 2)
    seen = hvd.allgather_object([v for batch in seeded for v in batch.numpy().tolist()])
    assert sorted(v for values in seen for v in values) == list(range(12))


@pytest.mark.np(2, 3, plain=False)
def test_ranks_that_differ() -> None:
    with pytest.raises(hvd.ConfigurationError, match=r"number of samples differs between ranks: rank 0 20, rank 1 21"):
        hvd.shard(np.zeros(20 + hvd.rank()), 2)
    with pytest.raises(hvd.ConfigurationError, match=r"batch_size differs between ranks: rank 0 2, rank 1 3"):
        hvd.shard(np.zeros(20), 2 + hvd.rank())
    known = tf.data.Dataset.range(12)
    mine = known if hvd.rank() else known.filter(lambda v: v >= 0)
    with pytest.raises(hvd.ConfigurationError, match=r"number of samples differs .*rank 0 unknown, rank 1 12"):
        hvd.shard(mine, 2, drop_remainder=True)
