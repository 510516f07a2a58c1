"""A model of tf_keras (or of the Keras of TensorFlow 2.15) in the graph of an Estimator."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from hvdx import keras_api
from hvdx.errors import ConfigurationError

from .checks import needed_placeholders
from .keras_io import Batch, copies_of
from .keras_optimizer import optimizer_recipe, update


class Keras2Source:
    """What is taken from a compiled model when it is handed in.

    Args:
        model: the model.
        custom_objects: classes and functions by the names under which the model's configuration has them.

    Raises:
        ConfigurationError: the model is not compiled.
        UnsupportedError: its optimizer scales the loss.
    """

    def __init__(self, model: Any, custom_objects: Mapping[str, Any]) -> None:
        if not getattr(model, "optimizer", None) or not getattr(model, "compiled_loss", None):
            raise ConfigurationError(f"Model {model.name!r} is not compiled; call compile(optimizer, loss) first.")
        self.model = model
        self.weights = model.get_weights() if model.built else []
        self.compiled = model._get_compile_args(user_metrics=True)
        self.optimizer = optimizer_recipe(model.optimizer)
        self.input_names = None if isinstance(getattr(model, "_nested_inputs", None), dict) else _names(model, "input")
        self.output_names = _names(model, "output")
        self._custom_objects = dict(custom_objects)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Know the custom objects, and undo at the end what Keras does to the classes of a model used in a graph.

        It puts the base classes for graphs in place of those for eager code, for all objects of these classes, until an
        object is made eagerly; without this, the model that was handed in would be of no use any more.
        """
        try:
            with _keras_of(self.model).utils.custom_object_scope(self._custom_objects):
                yield
        finally:
            with context.eager_mode():
                classes: set[Any] = {type(part) for part in [self.model, *self.model.submodules]}
                for cls in classes:
                    if hasattr(cls, "call"):
                        cls.__new__(cls)

    def in_graph(self, inputs: Any, training: bool) -> Keras2InGraph:
        """Return a copy of the model in the graph that is being built, run on the inputs."""
        return Keras2InGraph(self, inputs, training)


class Keras2InGraph:
    """A copy of a model that has been run in a graph."""

    def __init__(self, source: Keras2Source, inputs: Any, training: bool) -> None:
        self._source = source
        self._model = _copy(source.model)
        self.outputs = self._model(inputs, training=training)
        self.variables = list(self._model.weights)
        self.saved = None  # all variables, by their names in the graph

    def loss(self, batch: Batch, names: list[str]) -> Any:
        """Return the compiled loss of a batch, with the regularization."""
        compiled = self._source.compiled
        losses = type(self._source.model.compiled_loss)(
            compiled["loss"], loss_weights=compiled["loss_weights"], output_names=names
        )
        # The copy has also run on placeholders of its own, which nobody feeds.
        regularization = [loss for loss in self._model.losses if not needed_placeholders([loss])]
        return losses(*batch, regularization_losses=regularization)

    def metrics(self, batch: Batch, names: list[str]) -> dict[str, Any]:
        """Return the compiled metrics by name, updated with the batch."""
        compiled = self._source.compiled
        container = type(self._source.model.compiled_metrics)(
            copies_of(compiled["metrics"]), copies_of(compiled["weighted_metrics"]), output_names=names
        )
        container.update_state(*batch)
        return {metric.name: metric for metric in container.metrics}

    def train_op(self, loss: Any) -> Any:
        """Return the operation of a training step: the update of the weights and of statistics of the batch."""
        statistics = [op for op in self._model.updates if not needed_placeholders([op])]
        return tf.group(update(self._source.optimizer, loss, self._model.trainable_variables), *statistics)


def _names(model: Any, kind: str) -> list[str] | None:
    """Return the names of inputs or outputs; a subclassed model may know none."""
    return list(getattr(model, f"{kind}_names", None) or []) or None


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
