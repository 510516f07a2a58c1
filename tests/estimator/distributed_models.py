"""A model_fn and its data as users write them, for tests on several ranks; one import serves both environments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator

v1 = tf.compat.v1
WIDTH, BATCH, STEPS = 3, 12, 6  # a batch can be halved on 1, 2 and 3 ranks
X = np.random.default_rng(3).normal(size=(BATCH * STEPS, WIDTH)).astype("float32")
Y = (X @ np.array([[1.0], [-2.0], [0.5]], "float32") + 0.25).astype("float32")
EVAL_X = np.random.default_rng(4).normal(size=(10, WIDTH)).astype("float32")
EVAL_Y = (EVAL_X.sum(-1, keepdims=True)).astype("float32")


def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
    """Linear regression; `params`: seed or constant, distributed, optimizer, passes."""
    with v1.variable_scope("linear"):
        initial = v1.random_normal_initializer(seed=params.get("seed", 0))
        if "constant" in params:
            initial = v1.constant_initializer(params["constant"])
        kernel = v1.get_variable("kernel", [WIDTH, 1], initializer=initial)
        bias = v1.get_variable("bias", [1], initializer=v1.zeros_initializer())
    predictions = tf.matmul(features["x"], kernel) + bias
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"y": predictions})
    loss = tf.reduce_mean(tf.square(predictions - labels))
    v1.losses.add_loss(loss)
    if mode == estimator.ModeKeys.EVAL:
        metrics = {
            "mae": v1.metrics.mean_absolute_error(labels, predictions),
            "auc": v1.metrics.auc(labels > 0, tf.sigmoid(predictions)),
        }
        return estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    optimizer = params.get("optimizer", lambda: v1.train.AdamOptimizer(0.1))()
    if params.get("distributed", True):
        optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=params.get("passes", 1))
    train_op = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def sharded_input(input_context: Any) -> Any:
    """This rank's part of every global batch of the training data, once."""
    return _part(input_context.num_input_pipelines, input_context.input_pipeline_id)


def whole_input() -> Any:
    return _part(1, 0)


def _part(size: int, rank: int) -> Any:
    data = tf.data.Dataset.from_tensor_slices(({"x": X}, Y))
    return data.batch(BATCH).map(lambda x, y: ({"x": x["x"][rank::size]}, y[rank::size]))


def eval_input() -> Any:
    """Ten rows in batches of two: an odd number of batches."""
    return tf.data.Dataset.from_tensor_slices(({"x": EVAL_X}, EVAL_Y)).batch(2)


def make(folder: Path | None, *, save_steps: int = 2, **params: Any) -> Any:
    """Return an Estimator of this environment."""
    config = estimator.RunConfig(save_checkpoints_steps=save_steps, save_summary_steps=2, log_step_count_steps=2)
    return estimator.Estimator(model_fn, model_dir=folder and str(folder), config=config, params=params)


def specs(
    train_input: Callable[..., Any] = sharded_input, max_steps: int | None = STEPS, hooks: Any = (), **evaluation: Any
) -> tuple[Any, Any]:
    """Return TrainSpec and EvalSpec that evaluate every checkpoint."""
    settings = {"steps": None, "start_delay_secs": 0, "throttle_secs": 0, **evaluation}
    train = estimator.TrainSpec(train_input, max_steps=max_steps, hooks=list(hooks))
    return train, estimator.EvalSpec(eval_input, **settings)
