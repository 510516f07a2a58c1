"""An Estimator of a compiled Keras model: what model_to_estimator gave, for tf_keras and Keras 2."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context

from hvdx import keras_api
from hvdx.errors import ConfigurationError, UnsupportedError

from .checks import needed_placeholders
from .keras_optimizer import OptimizerRecipe, optimizer_recipe, update
from .model_fn import EstimatorSpec, ModeKeys

_v1 = tf.compat.v1


def estimator_from_keras(
    cls: type,
    keras_model: Any,
    model_dir: Any = None,
    config: Any = None,
    custom_objects: Mapping[str, Any] | None = None,
    metric_names_map: Mapping[str, str] | None = None,
) -> Any:
    """Return an Estimator that starts from the weights of a compiled model and trains with its loss and optimizer.

    The model itself is not changed: each graph gets a copy of it. Features may be a dict by the names of the model's
    inputs, labels one by the names of its outputs. Sample weights travel as features `{"features": ...,
    "sample_weights": ...}`. The predictions are a dict by the names of the outputs.

    Args:
        cls: the class of the Estimator.
        keras_model: a compiled model of tf_keras (or of the Keras of TensorFlow 2.15).
        model_dir: directory of checkpoints and summaries.
        config: a `RunConfig`.
        custom_objects: dict of names to the classes and functions that the model was made with.
        metric_names_map: dict of the metrics' names in Keras to their names in evaluations.

    Raises:
        ConfigurationError: no model, or one that is not compiled or cannot be copied.
        UnsupportedError: a model of Keras 3, or an optimizer with loss scaling.
    """
    _check_model(keras_model)
    converted = _Converted(
        keras_model,
        keras_model.get_weights() if keras_model.built else [],
        keras_model._get_compile_args(user_metrics=True),
        optimizer_recipe(keras_model.optimizer),
        metric_names_map,
    )

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        with _keras_of(keras_model).utils.custom_object_scope(dict(custom_objects or {})), _usable_again(keras_model):
            return _spec(converted, features, labels, mode)

    return cls(model_fn, model_dir, config)


@contextlib.contextmanager
def _usable_again(model: Any) -> Iterator[None]:
    """Undo what Keras does to the classes of a model when a model or layer is made in a graph.

    It puts the base classes for graphs in place of those for eager code, for all objects of these classes, until an
    object is made eagerly; without this, the model that was handed in would be of no use any more.
    """
    try:
        yield
    finally:
        with context.eager_mode():
            classes: set[Any] = {type(part) for part in [model, *model.submodules]}
            for cls in classes:
                if hasattr(cls, "call"):
                    cls.__new__(cls)


class _Converted(NamedTuple):
    """What was taken from the model when it was handed in."""

    model: Any
    weights: list[Any]
    compiled: dict[str, Any]
    optimizer: OptimizerRecipe
    metric_names_map: Mapping[str, str] | None


def _spec(converted: _Converted, features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Return the model in the graph that is being built."""
    model = _copy(converted.model)
    inputs, sample_weights = _inputs(converted.model, features)
    outputs = model(inputs, training=mode == ModeKeys.TRAIN)
    names = _output_names(converted.model, outputs)
    predictions = dict(zip(names, tf.nest.flatten(outputs), strict=True))
    scaffold = _start_from(model, converted.weights)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions, scaffold=scaffold)
    batch = _targets(labels, names, outputs), outputs, sample_weights
    loss = _loss(converted, model, names, batch)
    if mode == ModeKeys.EVAL:
        metrics = _metrics(converted, names, batch)
        return EstimatorSpec(mode, predictions, loss, eval_metric_ops=metrics, scaffold=scaffold)
    statistics = [op for op in model.updates if not needed_placeholders([op])]
    train_op = tf.group(update(converted.optimizer, loss, model.trainable_variables), *statistics)
    return EstimatorSpec(mode, predictions, loss, train_op, scaffold=scaffold)


def _check_model(model: Any) -> None:
    family = keras_api.model_family(model)
    if family == "keras 3":
        raise UnsupportedError(
            f"{model.name!r} is a model of Keras 3, which does not run in the graph of an Estimator. Build it with "
            "tf_keras instead (import tf_keras as keras), or train it with model.fit and hvd.DistributedOptimizer."
        )
    if family is None:
        raise ConfigurationError(f"Estimator.from_keras takes a compiled model of tf_keras; received {model!r}.")
    if not getattr(model, "optimizer", None) or not getattr(model, "compiled_loss", None):
        raise ConfigurationError(f"Model {model.name!r} is not compiled; call model.compile(optimizer, loss) first.")


def _keras_of(model: Any) -> Any:
    """Return the module, tf_keras or keras, that the model's base class is from."""
    name = next(name for name in keras_api.base_names(model) if ".src.engine.training.Model" in name)
    return importlib.import_module(name.split(".", 1)[0])


def _copy(model: Any) -> Any:
    """Return a model of the same configuration in the graph that is being built, without the weights."""
    keras = _keras_of(model)
    if isinstance(model, keras.Sequential) or model._is_graph_network:
        return keras.models.clone_model(model)
    try:
        return type(model).from_config(model.get_config())
    except (NotImplementedError, TypeError) as error:
        raise ConfigurationError(
            f"The subclassed model {model.name!r} cannot be copied into the graph of an Estimator: {error}. "
            "Give its class get_config(), which returns the arguments of its constructor."
        ) from error


def _start_from(model: Any, weights: list[Any]) -> Any:
    """Return a scaffold that sets the weights where there is no checkpoint to restore."""
    if not weights:
        return _v1.train.Scaffold()
    feeds = [_v1.placeholder(variable.dtype, variable.shape) for variable in model.weights]
    assigned = tf.group(*(_v1.assign(variable, feed) for variable, feed in zip(model.weights, feeds, strict=True)))
    return _v1.train.Scaffold(
        init_fn=lambda scaffold, session: session.run(
            assigned, {feed.name: weight for feed, weight in zip(feeds, weights, strict=True)}
        )
    )


def _inputs(model: Any, features: Any) -> tuple[Any, Any]:
    """Return the features as the model takes them, and the sample weights or None."""
    sample_weights = None
    if isinstance(features, dict) and set(features) == {"features", "sample_weights"}:
        sample_weights = features["sample_weights"]
        features = features["features"]
    names = getattr(model, "input_names", None)
    if not isinstance(features, dict) or not names or isinstance(getattr(model, "_nested_inputs", None), dict):
        return features, sample_weights
    return _by_name(features, names, "features", "inputs"), sample_weights


def _targets(labels: Any, names: list[str], outputs: Any) -> Any:
    if isinstance(labels, dict) and not isinstance(outputs, dict):
        return _by_name(labels, names, "labels", "outputs")
    return labels


def _by_name(values: dict[str, Any], names: list[str], given: str, wanted: str) -> Any:
    missing = [name for name in names if name not in values]
    if missing:
        raise ConfigurationError(
            f"The {given} lack {missing}: the model has the {wanted} {names}, the input_fn gives {sorted(values)}."
        )
    ordered = [values[name] for name in names]
    return ordered[0] if len(ordered) == 1 else ordered


def _output_names(model: Any, outputs: Any) -> list[str]:
    """Return the names of the outputs; a subclassed model may know none."""
    names = list(getattr(model, "output_names", None) or [])
    number = len(tf.nest.flatten(outputs))
    return names if len(names) == number else [f"output_{index + 1}" for index in range(number)]


def _loss(converted: _Converted, model: Any, names: list[str], batch: tuple[Any, Any, Any]) -> Any:
    """Return the compiled loss of a batch, with the regularization."""
    compiled = converted.compiled
    losses = type(converted.model.compiled_loss)(
        compiled["loss"], loss_weights=compiled["loss_weights"], output_names=names
    )
    # The copy of the model has also run on placeholders of its own, which nobody feeds.
    regularization = [loss for loss in model.losses if not needed_placeholders([loss])]
    return losses(*batch, regularization_losses=regularization)


def _metrics(converted: _Converted, names: list[str], batch: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Return the compiled metrics, updated with the batch, by name."""
    compiled, renamed = converted.compiled, converted.metric_names_map
    container = type(converted.model.compiled_metrics)(
        _fresh(compiled["metrics"]), _fresh(compiled["weighted_metrics"]), output_names=names
    )
    container.update_state(*batch)
    found = {metric.name: metric for metric in container.metrics}
    if renamed is None:
        return found
    if set(renamed) != set(found):
        raise ConfigurationError(f"metric_names_map must name the metrics {sorted(found)}; it has {sorted(renamed)}.")
    return {renamed[name]: metric for name, metric in found.items()}


def _fresh(metrics: Any) -> Any:
    """Return the metrics with copies of the objects among them, for those have variables outside of this graph."""

    def fresh(metric: Any) -> Any:
        return type(metric).from_config(metric.get_config()) if hasattr(metric, "update_state") else metric

    return tf.nest.map_structure(fresh, metrics)
