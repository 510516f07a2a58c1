"""What models of every Keras need in the graph of an Estimator: inputs and outputs by name, weights to start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigurationError

_v1 = tf.compat.v1
Batch = tuple[Any, Any, Any]
"""Targets, outputs, and sample weights or None."""


def scaffold_of(model: Any, weights: Sequence[Any], config: Any) -> Any:
    """Return a scaffold that sets the weights where there is no checkpoint to restore.

    Args:
        model: a model in the graph, with its `variables`, and as `saved` those to save by name, None for all.
        weights: a value for each of the variables; none to start at random.
        config: the `RunConfig`.
    """
    saver = init_fn = None
    if model.saved is not None:
        saver = _v1.train.Saver(
            {**model.saved, _v1.GraphKeys.GLOBAL_STEP: _v1.train.get_global_step()},
            sharded=True,
            max_to_keep=config.keep_checkpoint_max,
            keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
            save_relative_paths=True,
        )
    if weights:
        feeds = [_v1.placeholder(variable.dtype, variable.shape) for variable in model.variables]
        pairs = zip(model.variables, feeds, strict=True)
        assigned = tf.group(*(_v1.assign(variable, feed) for variable, feed in pairs))
        values = {feed.name: weight for feed, weight in zip(feeds, weights, strict=True)}

        def init_fn(scaffold: Any, session: Any) -> None:
            session.run(assigned, values)

    return _v1.train.Scaffold(init_fn=init_fn, saver=saver)


def split_sample_weights(features: Any) -> tuple[Any, Any]:
    """Return the features and the sample weights, None if there are none."""
    if isinstance(features, dict) and set(features) == {"features", "sample_weights"}:
        return features["features"], features["sample_weights"]
    return features, None


def by_name(values: Any, names: list[str] | None, given: str, wanted: str) -> Any:
    """Return the values of a dict in the order of the model's names; anything else as it is.

    Raises:
        ConfigurationError: the dict lacks one of them.
    """
    if not isinstance(values, dict) or not names:
        return values
    missing = [name for name in names if name not in values]
    if missing:
        raise ConfigurationError(
            f"The {given} lack {missing}: the model has the {wanted} {names}, the input_fn gives {sorted(values)}."
        )
    ordered = [values[name] for name in names]
    return ordered[0] if len(ordered) == 1 else ordered


def names_of_outputs(names: list[str] | None, outputs: Any) -> list[str]:
    """Return the names of the outputs, which are counted where the model knows none."""
    number = len(tf.nest.flatten(outputs))
    return names if names and len(names) == number else [f"output_{index + 1}" for index in range(number)]


def copies_of(metrics: Any) -> Any:
    """Return the metrics with copies of the objects among them, for those have variables outside of this graph."""

    def copied(metric: Any) -> Any:
        return type(metric).from_config(metric.get_config()) if hasattr(metric, "update_state") else metric

    return tf.nest.map_structure(copied, metrics)
