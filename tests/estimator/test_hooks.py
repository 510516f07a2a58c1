"""The session hooks in v1 programs of the user's own: MonitoredTrainingSession, warm-up, exact metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator
from keras_callbacks.schedules import rate_at_step

v1 = tf.compat.v1
pytestmark = pytest.mark.np(2, 3)


def test_monitored_training_session(world: Any, tmp_path: Path) -> None:
    """Only rank 0 has a directory; all ranks start from its variables, and again when it resumes."""
    folder = str(tmp_path) if world.rank() == 0 else None
    starts = []
    for last in (3, 5):
        with tf.Graph().as_default():
            weight = v1.get_variable("weight", [2], initializer=v1.random_normal_initializer(seed=world.rank()))
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
            loss = tf.reduce_sum(tf.square(weight - float(world.rank())))
            update = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
            hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=last)]
            with v1.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks) as session:
                starts.append(session.run_step_fn(lambda step_context: step_context.session.run(weight)))  # noqa: B023
                while not session.should_stop():
                    session.run(update)
    everybody = world.allgather_object([start.tobytes() for start in starts])
    assert all(other == everybody[0] for other in everybody)
    mean = (world.size() - 1) / 2
    first, second = starts
    np.testing.assert_allclose(second, mean + (first - mean) * 0.8**3, rtol=1e-5)


@pytest.mark.parametrize("size", [None, 4])
def test_warmup_is_a_function_of_the_step(world: Any, tmp_path: Path, size: int | None) -> None:
    """The rates of a run that is interrupted and resumed are those of the rule, at every step."""
    moved = [0.0]
    for last in (3, 8):
        with tf.Graph().as_default():
            step = v1.train.get_or_create_global_step()
            hook = estimator.LearningRateWarmupHook(0.4, 5, size)
            weight = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
            # each step moves the weight by exactly the rate
            update = v1.train.GradientDescentOptimizer(hook.learning_rate).minimize(-weight, global_step=step)
            session = v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), hooks=[hook, v1.train.StopAtStepHook(last_step=last)]
            )
            with session:
                while not session.should_stop():
                    session.run(update)
                    if not session.should_stop():
                        moved.append(float(session.run_step_fn(lambda step_context: step_context.session.run(weight))))  # noqa: B023
            moved.append(float(tf.train.load_variable(str(tmp_path), "weight")))
    expected = [rate_at_step(number, 0.4, size or world.size(), 1, 5) for number in range(8)]
    np.testing.assert_allclose(np.diff(moved), expected, rtol=1e-4)


def test_metrics_are_those_of_all_data(world: Any) -> None:
    """Ranks with different numbers of rows, and one with none; means, AUC, precision and a confusion matrix."""
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 20), rng.random(20).astype("float32")
    shares = [slice(0, 7), slice(7, 20), slice(20, 20)] if world.size() > 1 else [slice(0, 20)]

    def evaluate(part: slice, hooks: list[Any]) -> dict[str, float]:
        with tf.Graph().as_default():
            label, score = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float32, [None])
            guess = tf.cast(score > 0.5, tf.int64)
            metrics = {
                "accuracy": v1.metrics.accuracy(label, guess),
                "auc": v1.metrics.auc(label, score),
                "precision": v1.metrics.precision(label, guess),
                "mean": v1.metrics.mean(score),
                "per_class": v1.metrics.mean_per_class_accuracy(label, guess, 2),
            }
            values = {name: value for name, (value, _) in metrics.items()}
            final = v1.train.FinalOpsHook(values)
            rows = list(zip(labels[part], scores[part], strict=True))
            with v1.train.MonitoredSession(hooks=[*hooks, final]) as session:
                for a, b in rows:
                    session.run([op for _, op in metrics.values()], {label: [a], score: [b]})
            return {name: float(value) for name, value in final.final_ops_values.items()}

    result = evaluate(shares[world.rank()], [estimator.MetricAverageHook()])
    expected = evaluate(slice(0, 20), [])
    assert result == pytest.approx(expected, rel=1e-6)


def test_a_sharded_input_fn_still_gets_what_it_asks_for(world: Any, tmp_path: Path) -> None:
    """Of the Estimator of this TensorFlow, which looks at the names of its parameters."""
    asked: list[int] = []

    def input_fn(params: dict[str, Any], mode: str) -> Any:
        asked.append(params["rows"])
        rows = np.ones((params["rows"], 2), "float32")
        return tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(1)

    def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
        loss = tf.reduce_mean(tf.square(features - labels) * v1.get_variable("weight", []))
        update = v1.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=v1.train.get_global_step())
        return estimator.EstimatorSpec(mode, loss=loss, train_op=update)

    model = estimator.Estimator(model_fn, model_dir=str(tmp_path), params={"rows": 6})
    model.train(estimator.shard_input_fn(input_fn))
    assert asked == [6]
    assert model.get_variable_value("global_step") == 6 // world.size()
