"""The evaluation metrics of a model_fn: pairs of a value and its update, or metric objects of Keras 2."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigurationError, UnsupportedError

from .checks import check_tensor


def checked_metrics(metrics: Any) -> dict[str, tuple[Any, Any]]:
    """Return the metrics as pairs of a value tensor and an update op.

    The variables of Keras metrics are put among the local variables, which is where evaluation initializes them.

    Raises:
        ConfigurationError: no dict, or a value that is no pair and no metric, or a tensor of another graph.
        UnsupportedError: a metric of Keras 3, which does not work in the graphs of an Estimator.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, dict):
        raise ConfigurationError(f"eval_metric_ops must be a dict of names to metrics; received {metrics!r}.")
    return {name: _pair(name, metric) for name, metric in metrics.items()}


def _pair(name: str, metric: Any) -> tuple[Any, Any]:
    if hasattr(metric, "update_state") and hasattr(metric, "result"):
        return _pair_of_keras_metric(name, metric)
    if not isinstance(metric, tuple) or len(metric) != 2:
        raise ConfigurationError(
            f"eval_metric_ops[{name!r}] must be a tuple (value, update_op), as tf.compat.v1.metrics gives; "
            f"received {metric!r}."
        )
    for part in tf.nest.flatten(metric):
        check_tensor(part, f"eval_metric_ops[{name!r}]", or_operation=True)
    return metric


def _pair_of_keras_metric(name: str, metric: Any) -> tuple[Any, Any]:
    if not hasattr(metric, "updates"):
        raise UnsupportedError(
            f"eval_metric_ops[{name!r}] is a metric of Keras 3 ({type(metric).__name__}), which has no updates in the "
            "graph of an Estimator. Take tf.compat.v1.metrics, or the metric of the same name from tf_keras."
        )
    if not metric.updates:
        raise ConfigurationError(
            f"eval_metric_ops[{name!r}]: call update_state(...) on the metric {metric.name!r} inside model_fn first."
        )
    updates = list(metric.updates)
    value = metric.result()
    for part in [*updates, value]:
        check_tensor(part, f"eval_metric_ops[{name!r}]", or_operation=True)
    for collection in (tf.compat.v1.GraphKeys.LOCAL_VARIABLES, tf.compat.v1.GraphKeys.METRIC_VARIABLES):
        known = {id(variable) for variable in tf.compat.v1.get_collection(collection)}
        for variable in metric.variables:
            if id(variable) not in known:
                tf.compat.v1.add_to_collection(collection, variable)
    return value, updates[0] if len(updates) == 1 else tf.group(*updates)
