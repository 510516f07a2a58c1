"""Small models and inputs that the tests of hvdx.estimator.own share, and their training in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.estimator import own

v1 = tf.compat.v1
RATE = 0.05
FEATURES = np.random.RandomState(7).randn(24, 3).astype("float32")
LABELS = (FEATURES @ np.float32([[1.0], [-2.0], [0.5]]) + 0.25).astype("float32")


def linear_model_fn(features: Any, labels: Any, mode: str, *, api: Any = own) -> Any:
    """A linear model from zero, trained by plain gradient descent on the mean squared error."""
    weights = v1.get_variable("weights", [3, 1], initializer=v1.zeros_initializer())
    bias = v1.get_variable("bias", [1], initializer=v1.zeros_initializer())
    predicted = tf.matmul(features, weights) + bias
    if mode == api.ModeKeys.PREDICT:
        return api.EstimatorSpec(mode, predictions={"value": predicted, "row_sum": tf.reduce_sum(features, axis=1)})
    loss = tf.reduce_mean(tf.square(predicted - labels))
    train_op = v1.train.GradientDescentOptimizer(RATE).minimize(loss, v1.train.get_global_step())
    metrics = {"mae": v1.metrics.mean_absolute_error(labels, predicted)}
    return api.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def batches(size: int = 8, repeat: int | None = 1, rows: int = 24) -> Callable[[], Any]:
    """Return an input_fn of the data in their order."""
    return lambda: tf.data.Dataset.from_tensor_slices((FEATURES[:rows], LABELS[:rows])).batch(size).repeat(repeat)


def trained_by_hand(steps: int, size: int = 8) -> tuple[np.ndarray, np.ndarray, float]:
    """Return weights, bias and the last loss after so many steps of the linear model in NumPy."""
    weights, bias, loss = np.zeros((3, 1)), np.zeros(1), float("nan")
    for step in range(steps):
        start = step * size % 24
        x, y = FEATURES[start : start + size], LABELS[start : start + size]
        error = x @ weights + bias - y
        loss = float(np.mean(error**2))
        weights = weights - RATE * 2 * x.T @ error / len(x)
        bias = bias - RATE * 2 * error.mean(axis=0)
    return weights, bias, loss


def linear(model_dir: Any, **config: Any) -> own.Estimator:
    """Return an Estimator of the linear model."""
    return own.Estimator(linear_model_fn, str(model_dir), own.RunConfig(tf_random_seed=1, **config))
