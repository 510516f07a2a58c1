"""Canned Estimators of TensorFlow 2.15 with feature columns, and strategies: two ranks against one process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator
from hvdx.errors import UnsupportedError
from tests.estimator.watching import Watch, shared_folder
from tests.support.jobs import ROOT

v1 = tf.compat.v1
pytestmark = [
    pytest.mark.np(2),
    pytest.mark.skipif(not estimator.has_tf_estimator(), reason="this TensorFlow has no canned Estimators"),
]
BATCH, STEPS, WORDS = 12, 6, ["craft", "sales", "farming", "clerk"]
_random = np.random.default_rng(5)
COLUMNS = {
    "age": _random.integers(17, 80, BATCH * STEPS).astype("float32"),
    "hours": _random.normal(40, 10, BATCH * STEPS).astype("float32"),
    "work": np.array(WORDS)[_random.integers(0, len(WORDS), BATCH * STEPS)],
}
PAY = (COLUMNS["age"] / 50 + COLUMNS["hours"] / 40 + (COLUMNS["work"] == "sales")).astype("float32")[:, None]
RICH = (np.median(PAY) < PAY).astype("int64")


def columns() -> tuple[list[Any], list[Any]]:
    """Return the columns of a wide and of a deep part: bucketized, hashed, crossed; numeric and embedded."""
    column = tf.feature_column
    age = column.numeric_column("age", normalizer_fn=lambda value: value / 50)
    hours = column.numeric_column("hours", normalizer_fn=lambda value: value / 40)
    ages = column.bucketized_column(column.numeric_column("age"), [30, 45, 60])
    words = column.categorical_column_with_vocabulary_list("work", WORDS)
    hashed = column.categorical_column_with_hash_bucket("work", 10)
    wide = [ages, hashed, column.crossed_column([ages, "work"], 20)]
    return wide, [age, hours, column.embedding_column(words, 3), column.indicator_column(words)]


def dnn_classifier(wrap: Callable[[Any], Any], **settings: Any) -> Any:
    def optimizer() -> Any:  # a function, for a Keras optimizer serves in one graph only
        return wrap(tf.keras.optimizers.legacy.Adam(0.05))

    return estimator.DNNClassifier([8, 4], columns()[1], optimizer=optimizer, **settings)


def linear_regressor(wrap: Callable[[Any], Any], **settings: Any) -> Any:
    def optimizer() -> Any:
        return wrap(tf.keras.optimizers.legacy.Ftrl(0.1))

    return estimator.LinearRegressor(columns()[0], optimizer=optimizer, **settings)


def combined(kind: str) -> Callable[..., Any]:
    def make(wrap: Callable[[Any], Any], **settings: Any) -> Any:
        wide, deep = columns()
        legacy = tf.keras.optimizers.legacy
        return getattr(estimator, kind)(
            linear_feature_columns=wide,
            linear_optimizer=lambda: wrap(legacy.Ftrl(0.1)),
            dnn_feature_columns=deep,
            dnn_optimizer=lambda: wrap(legacy.Adagrad(0.1)),
            dnn_hidden_units=[8, 4],
            **settings,
        )

    return make


def combined_v1(wrap: Callable[[Any], Any], **settings: Any) -> Any:
    """The older kind, with v1 optimizers; its loss is a mean here, as that of the others."""
    wide, deep = columns()
    return v1.estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=wide,
        linear_optimizer=wrap(v1.train.FtrlOptimizer(0.1)),
        dnn_feature_columns=deep,
        dnn_optimizer=wrap(v1.train.AdagradOptimizer(0.1)),
        dnn_hidden_units=[8, 4],
        loss_reduction=v1.losses.Reduction.SUM_OVER_BATCH_SIZE,
        **settings,
    )


MODELS: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "DNNClassifier": (dnn_classifier, RICH),
    "LinearRegressor": (linear_regressor, PAY),
    "DNNLinearCombinedRegressor": (combined("DNNLinearCombinedRegressor"), PAY),
    "DNNLinearCombinedClassifier": (combined("DNNLinearCombinedClassifier"), RICH),
    "DNNLinearCombinedClassifier of v1": (combined_v1, RICH),
}


def input_of(labels: np.ndarray, size: int, rank: int) -> Callable[[], Any]:
    """Return an input_fn of this rank's part of every batch, again and again."""

    def part(batch: Any) -> Any:
        return tf.nest.map_structure(lambda values: values[rank::size], batch)

    def read() -> Any:
        data = tf.data.Dataset.from_tensor_slices((COLUMNS, labels)).batch(BATCH)
        return data.map(lambda x, y: (part(x), part(y))).repeat()

    return read


def evaluation_of(labels: np.ndarray) -> Callable[[], Any]:
    return lambda: tf.data.Dataset.from_tensor_slices((COLUMNS, labels)).batch(8)


@pytest.mark.np(2, plain=False)
@pytest.mark.parametrize("name", MODELS)
def test_as_one_process(world: Any, tmp_path: Path, name: str) -> None:
    """Both start from a checkpoint of the first step; then losses, weights, and the metrics in which ranks share."""
    make, labels = MODELS[name]
    config = estimator.RunConfig(save_checkpoints_steps=STEPS, tf_random_seed=1)
    folder = shared_folder(world, tmp_path)
    found = None
    if world.rank() == 0:
        alone, watch = make(lambda optimizer: optimizer, model_dir=str(tmp_path / "alone"), config=config), Watch()
        alone.train(input_of(labels, 1, 0), max_steps=1)
        shutil.copytree(tmp_path / "alone", folder)
        alone.train(input_of(labels, 1, 0), hooks=[watch], max_steps=1 + STEPS)
        found = watch.losses, watch.weights, alone.evaluate(evaluation_of(labels))
    losses, weights, wanted = world.broadcast_object(found, 0)

    watch = Watch()
    train = estimator.TrainSpec(input_of(labels, world.size(), world.rank()), max_steps=1 + STEPS, hooks=[watch])
    evaluate = estimator.EvalSpec(evaluation_of(labels), steps=None, start_delay_secs=0, throttle_secs=0)
    mine = make(hvd.DistributedOptimizer, model_dir=str(folder), config=config)
    metrics, _ = estimator.train_and_evaluate(mine, train, evaluate, evaluation="sharded")
    assert metrics is not None
    assert len(watch.losses) == STEPS
    np.testing.assert_allclose(np.mean(world.allgather_object(watch.losses), 0), losses, rtol=1e-5, atol=1e-6)
    watch.check_same_as(weights, world)
    assert set(metrics) == set(wanted)
    for metric, value in wanted.items():
        np.testing.assert_allclose(metrics[metric], value, rtol=1e-4, atol=1e-6, err_msg=metric)


@pytest.mark.np(2, plain=False)
def test_strategies_and_ranks_do_not_mix(world: Any, tmp_path: Path) -> None:
    config = estimator.RunConfig(train_distribute=tf.distribute.MirroredStrategy(["CPU:0"]))
    mine = linear_regressor(hvd.DistributedOptimizer, model_dir=str(shared_folder(world, tmp_path)), config=config)
    train = estimator.TrainSpec(input_of(PAY, 1, 0), max_steps=2)
    evaluate = estimator.EvalSpec(evaluation_of(PAY), steps=None)
    with pytest.raises(UnsupportedError, match="train_distribute"):
        estimator.train_and_evaluate(mine, train, evaluate)


REPLICAS = """
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import numpy as np
import hvdx as hvd
from tests.estimator import test_canned as canned
hvd.init("single")
seen = []

def read(input_context):
    seen.append(input_context.num_replicas_in_sync)
    return canned.input_of(canned.PAY, 1, 0)()

def run(folder, **settings):
    config = canned.estimator.RunConfig(save_checkpoints_steps=2, **settings)
    mine = canned.linear_regressor(hvd.DistributedOptimizer, model_dir=folder, config=config)
    train = canned.estimator.TrainSpec(read, max_steps=4)
    test = canned.estimator.EvalSpec(canned.evaluation_of(canned.PAY), steps=None, throttle_secs=0)
    metrics, _ = canned.estimator.train_and_evaluate(mine, train, test)
    print("ENDED at", metrics["global_step"], "with", seen)

import sys
on_cpu = tf.distribute.ReductionToOneDevice()  # TensorFlow's collectives hang in a session with logical CPUs
run(sys.argv[1], train_distribute=tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], on_cpu))
"""


@pytest.mark.np
def test_train_distribute_works_in_one_process(tmp_path: Path) -> None:
    """Two replicas in one process, with an optimizer that is distributed, and with the strategy's own InputContext."""
    ended = subprocess.run(
        [sys.executable, "-c", REPLICAS, str(tmp_path)], cwd=ROOT, text=True, timeout=120, capture_output=True
    )
    assert "ENDED at 4 with [2]" in ended.stdout, ended.stderr[-3000:]
