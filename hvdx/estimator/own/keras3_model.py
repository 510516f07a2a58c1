"""A model of Keras 3 in the graph of an Estimator, through the stateless calls that Keras 3 has."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigurationError, UnsupportedError

from .checks import parameters_of
from .keras_io import Batch, copies_of
from .keras_optimizer import optimizer_recipe, update_keras_3

_v1 = tf.compat.v1


class Keras3Source:
    """What is taken from a compiled model when it is handed in.

    Args:
        model: the model.
        custom_objects: classes and functions by the names under which the model's configuration has them.

    Raises:
        ConfigurationError: the model is not compiled or has no weights yet.
        UnsupportedError: its optimizer scales the loss or accumulates gradients, or Keras does not run on TensorFlow.
    """

    def __init__(self, model: Any, custom_objects: Mapping[str, Any]) -> None:
        if not getattr(model, "compiled", False) or model.optimizer is None or model._compile_loss is None:
            raise ConfigurationError(f"Model {model.name!r} is not compiled; call compile(optimizer, loss) first.")
        if not model.built:
            raise ConfigurationError(f"Model {model.name!r} is not built; give it an Input, or call it on a batch.")
        if model.variables and not isinstance(model.variables[0].value, tf.Variable):
            raise UnsupportedError(
                f"The weights of {model.name!r} are no TensorFlow variables: an Estimator needs Keras 3 on TensorFlow. "
                'Set KERAS_BACKEND=tensorflow before "import keras".'
            )
        if getattr(model.optimizer, "gradient_accumulation_steps", None):
            raise UnsupportedError(
                f"{type(model.optimizer).__name__} has gradient_accumulation_steps, with which the global step of an "
                "Estimator would not count updates; compile the model without, or use model.fit."
            )
        self.model = model
        self.weights = [variable.numpy() for variable in model.variables]
        # The names in a graph depend on what was made before, so checkpoints have those of the model as it was given.
        self.paths = _distinct([variable.path for variable in model.variables])
        self.optimizer = optimizer_recipe(model.optimizer)
        inputs = getattr(model, "inputs", None)
        by_list = isinstance(inputs, (list, tuple)) and not isinstance(getattr(model, "_inputs_struct", None), dict)
        self.input_names = [tensor.name for tensor in inputs] if inputs and by_list else None
        self.output_names = list(getattr(getattr(model, "_functional", model), "output_names", None) or []) or None
        self._custom_objects = dict(custom_objects)
        try:
            self._config = model.get_config()
        except NotImplementedError as error:
            raise ConfigurationError(
                f"The subclassed model {model.name!r} cannot be copied into the graph of an Estimator: {error}. "
                "Give its class get_config(), which returns the arguments of its constructor."
            ) from error

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Keras 3 needs nothing around the building of a graph."""
        yield

    def in_graph(self, inputs: Any, training: bool) -> Keras3InGraph:
        """Return a copy of the model in the graph that is being built, run on the inputs."""
        kind = type(self.model)
        functional = hasattr(self.model, "_functional") or hasattr(self.model, "_inputs_struct")
        arguments = {"custom_objects": self._custom_objects} if functional else {}
        copied = kind.from_config(copy.deepcopy(self._config), **arguments)  # which empties what it gets
        return Keras3InGraph(self, copied, inputs, training)


class Keras3InGraph:
    """A copy of a model that has been run in a graph."""

    def __init__(self, source: Keras3Source, copied: Any, inputs: Any, training: bool) -> None:
        self._source = source
        self._model = copied
        if not copied.built:
            copied(inputs)  # creates the variables of the layers inside
        self.variables = [variable.value for variable in copied.variables]
        self.saved = dict(zip(source.paths, self.variables, strict=True))
        trained, others = copied.trainable_variables, copied.non_trainable_variables
        self.outputs, states, self._losses = copied.stateless_call(
            [variable.value for variable in trained],
            [variable.value for variable in others],
            inputs,
            return_losses=True,
            **({"training": training} if "training" in parameters_of(copied.call) else {}),
        )
        self._new_states = list(zip(others, states, strict=True))

    def loss(self, batch: Batch, names: list[str]) -> Any:
        """Return the compiled loss of a batch, with the regularization."""
        compiled = self._source.model._compile_loss
        with _local_variables():
            losses = type(compiled)(compiled._user_loss, compiled._user_loss_weights, output_names=names)
            loss = losses(*batch)
        return tf.add_n([loss, *(tf.reduce_sum(tf.cast(extra, loss.dtype)) for extra in self._losses)])

    def metrics(self, batch: Batch, names: list[str]) -> dict[str, Any]:
        """Return the compiled metrics by name, as pairs of a value and an update with the batch."""
        compiled = self._source.model._compile_metrics
        if compiled is None:
            return {}
        targets, outputs, sample_weights = batch
        with _local_variables():
            container = type(compiled)(
                copies_of(compiled._user_metrics), copies_of(compiled._user_weighted_metrics), output_names=names
            )
            container.build(targets, outputs)

        @tf.function(autograph=False)
        def update_state() -> Any:
            container.update_state(targets, outputs, sample_weight=sample_weights)
            return tf.constant(True)

        done = update_state().op
        return {name: (tf.convert_to_tensor(value), done) for name, value in container.result().items()}

    def train_op(self, loss: Any) -> Any:
        """Return the operation of a training step: the update of the weights and of other states of the model."""
        states = [variable.value.assign(state) for variable, state in self._new_states]
        updated, optimizer = update_keras_3(self._source.optimizer, loss, self._model.trainable_variables)
        self.saved.update({variable.path: variable.value for variable in optimizer.variables})
        return tf.group(updated, *states)


@contextlib.contextmanager
def _local_variables() -> Iterator[None]:
    """Make the variables that are created inside local ones, which no checkpoint holds."""
    known = {id(variable) for variable in _v1.global_variables()}
    yield
    created = [variable for variable in _v1.global_variables() if id(variable) not in known]
    remaining = _v1.get_collection_ref(_v1.GraphKeys.GLOBAL_VARIABLES)
    remaining[:] = [variable for variable in remaining if id(variable) in known]
    for variable in created:
        _v1.add_to_collection(_v1.GraphKeys.LOCAL_VARIABLES, variable)
        _v1.add_to_collection(_v1.GraphKeys.METRIC_VARIABLES, variable)


def _distinct(names: list[str]) -> list[str]:
    """Return the names, with a number behind those that came before."""
    return [name if names.index(name) == index else f"{name}_{index}" for index, name in enumerate(names)]
