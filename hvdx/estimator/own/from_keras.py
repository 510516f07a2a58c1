"""An Estimator of a compiled Keras model: what model_to_estimator gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdx import keras_api
from hvdx.errors import ConfigurationError

from . import keras2_model, keras3_model
from .keras_io import by_name, names_of_outputs, scaffold_of, split_sample_weights
from .model_fn import EstimatorSpec, ModeKeys


def estimator_from_keras(
    cls: type,
    keras_model: Any,
    model_dir: Any = None,
    config: Any = None,
    custom_objects: Mapping[str, Any] | None = None,
    metric_names_map: Mapping[str, str] | None = None,
    spec_class: Any = EstimatorSpec,
) -> Any:
    """Return an Estimator that starts from the weights of a compiled model and trains with its loss and optimizer.

    The model itself is not changed: each graph gets a copy of it. Features may be a dict by the names of the model's
    inputs, labels one by the names of its outputs. Sample weights travel as features `{"features": ...,
    "sample_weights": ...}`. The predictions are a dict by the names of the outputs.

    Args:
        cls: the class of the Estimator.
        keras_model: a compiled model of tf_keras, Keras 3 or the Keras of TensorFlow 2.15.
        model_dir: directory of checkpoints and summaries.
        config: a `RunConfig`.
        custom_objects: dict of names to the classes and functions that the model was made with.
        metric_names_map: dict of the metrics' names in Keras to their names in evaluations.
        spec_class: what `cls` wants a model_fn to return; with tf.estimator.Estimator, tf.estimator.EstimatorSpec.

    Raises:
        ConfigurationError: no model, or one that is not compiled or cannot be copied.
        UnsupportedError: an optimizer that scales the loss, or one of Keras 3 that accumulates gradients.
    """
    source = _source(keras_model, custom_objects or {})

    def model_fn(features: Any, labels: Any, mode: str, config: Any) -> Any:
        with source.scope():
            fields, model = _fields(source, features, labels, mode, metric_names_map)
            return spec_class(mode, scaffold=scaffold_of(model, source.weights, config), **fields)

    return cls(model_fn, model_dir, config)


def _source(model: Any, custom_objects: Mapping[str, Any]) -> Any:
    family = keras_api.model_family(model)
    if family is None:
        raise ConfigurationError(f"Estimator.from_keras takes a compiled model of tf_keras or Keras 3: {model!r}.")
    if family == "keras 3":
        return keras3_model.Keras3Source(model, custom_objects)
    return keras2_model.Keras2Source(model, custom_objects)


def _fields(
    source: Any, features: Any, labels: Any, mode: str, metric_names_map: Mapping[str, str] | None
) -> tuple[dict[str, Any], Any]:
    """Return the fields of the EstimatorSpec, and the model in the graph that is being built."""
    features, sample_weights = split_sample_weights(features)
    inputs = by_name(features, source.input_names, "features", "inputs")
    model = source.in_graph(inputs, training=mode == ModeKeys.TRAIN)
    names = names_of_outputs(source.output_names, model.outputs)
    predictions = dict(zip(names, tf.nest.flatten(model.outputs), strict=True))
    fields: dict[str, Any] = {"predictions": predictions}
    if mode == ModeKeys.PREDICT:
        return fields, model
    targets = labels if isinstance(model.outputs, dict) else by_name(labels, names, "labels", "outputs")
    batch = targets, model.outputs, sample_weights
    fields["loss"] = model.loss(batch, names)
    if mode == ModeKeys.EVAL:
        fields["eval_metric_ops"] = _renamed(model.metrics(batch, names), metric_names_map)
    else:
        fields["train_op"] = model.train_op(fields["loss"])
    return fields, model


def _renamed(metrics: dict[str, Any], names: Mapping[str, str] | None) -> dict[str, Any]:
    if names is None:
        return metrics
    if set(names) != set(metrics):
        raise ConfigurationError(f"metric_names_map must name the metrics {sorted(metrics)}; it has {sorted(names)}.")
    return {names[name]: metric for name, metric in metrics.items()}
