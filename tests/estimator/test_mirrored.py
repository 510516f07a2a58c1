"""TensorFlow's Estimator with `RunConfig(train_distribute=strategy("mirrored"))`: two devices against one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator
from hvdx.distribute import strategy
from tests.estimator import distributed_models as models
from tests.support.jobs import ROOT

v1 = tf.compat.v1
pytestmark = pytest.mark.skipif(not estimator.has_tf_estimator(), reason="this TensorFlow has no Estimators")
OPTIMIZERS = {
    "v1": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
    "v1-wrapped": lambda: hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.05, 0.9)),
    "keras-legacy": lambda: tf.keras.optimizers.legacy.Adam(0.05),
    "keras-legacy-wrapped": lambda: hvd.DistributedOptimizer(tf.keras.optimizers.legacy.Adam(0.05)),
}


def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
    """Linear regression with an optimizer of TensorFlow 1 or of Keras, under any strategy."""
    optimizer = OPTIMIZERS[params["optimizer"]]()
    kernel = v1.get_variable("kernel", [models.WIDTH, 1], initializer=v1.random_normal_initializer(seed=1))
    bias = v1.get_variable("bias", [1], initializer=v1.zeros_initializer())
    predictions = tf.matmul(features["x"], kernel) + bias
    loss = tf.reduce_mean(tf.square(predictions - labels))
    if mode == estimator.ModeKeys.EVAL:
        metrics = {"mae": v1.metrics.mean_absolute_error(labels, predictions)}
        return estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    if hasattr(optimizer, "get_updates"):
        optimizer.iterations = v1.train.get_or_create_global_step()
        share = loss / tf.distribute.get_strategy().num_replicas_in_sync  # as Keras's optimizers want it
        update = tf.group(optimizer.get_updates(share, [kernel, bias])[0])
    else:
        update = optimizer.minimize(loss, v1.train.get_or_create_global_step())
    return estimator.EstimatorSpec(mode, loss=loss, train_op=update)


def even() -> Any:
    """Four batches, which two devices take in two steps."""
    return models.eval_input().take(4)


def run(folder: str) -> dict[str, Any]:
    """Train and evaluate with each optimizer on one device and on two; return the metrics and variables."""
    found: dict[str, Any] = {}
    for name in OPTIMIZERS:
        for made, rows in ((None, models.BATCH), (strategy("mirrored"), models.BATCH // 2)):

            def read(rows: int = rows) -> Any:  # the batch of one replica
                return tf.data.Dataset.from_tensor_slices(({"x": models.X}, models.Y)).batch(rows)

            config = estimator.RunConfig(train_distribute=made, eval_distribute=made, tf_random_seed=1)
            place = f"{folder}/{name}-{rows}"
            mine = estimator.Estimator(model_fn, place, config, {"optimizer": name})
            if name == "v1-wrapped":  # and through the executor of hvdx
                train = estimator.TrainSpec(read, max_steps=models.STEPS)
                test = estimator.EvalSpec(even, steps=None, throttle_secs=0)
                metrics, _ = estimator.train_and_evaluate(mine, train, test)
            else:
                mine.train(read, max_steps=models.STEPS)
                metrics = mine.evaluate(even)
            values = [mine.get_variable_value(variable).tolist() for variable in ("kernel", "bias")]
            found.setdefault(name, []).append([_floats(metrics), values])
    # Of five batches, two devices use four, and say so.
    found["odd"] = [_floats(mine.evaluate(models.eval_input)) for _ in range(10)]
    return found


def _floats(metrics: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


PROGRAM = """
import json, sys
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
from tests.estimator import test_mirrored
print("FOUND " + json.dumps(test_mirrored.run(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all optimizers came to, on one device and on two."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("models"))]
    ended = subprocess.run(command, cwd=ROOT, text=True, timeout=200, capture_output=True)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, ended.stdout + ended.stderr[-3000:]
    return {**json.loads(lines[0].removeprefix("FOUND ")), "said": ended.stderr}


@pytest.mark.timeout(220)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_devices_equal_one(found: dict[str, Any], name: str) -> None:
    (wanted, weights), (metrics, values) = found[name]
    assert metrics["global_step"] == wanted["global_step"] == models.STEPS
    assert metrics["mae"] == pytest.approx(wanted["mae"], rel=1e-5)
    for value, weight in zip(values, weights, strict=True):
        assert [*tf.nest.flatten(value)] == pytest.approx([*tf.nest.flatten(weight)], rel=1e-5, abs=1e-6)


@pytest.mark.timeout(220)
def test_a_step_that_not_all_devices_can_make_is_not_made(found: dict[str, Any]) -> None:
    metrics = found[list(OPTIMIZERS)[-1]][1][0]
    assert all(odd == pytest.approx(metrics) for odd in found["odd"])
    assert found["said"].count("no multiple of the 2 devices, which take one each in a step: the last 1 ") == 10
