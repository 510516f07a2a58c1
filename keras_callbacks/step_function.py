"""What stands around a model's train and test functions during `fit`: work before the first step, and clear errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import tensorflow as tf

from hvdx import keras_api, world
from hvdx.errors import ConfigurationError, HvdxError
from hvdx.logs import log

NAMES = ("train_function", "test_function")


class StepFunction:
    """A model's train or test function, as `fit` calls it: with an iterator, once a step.

    Args:
        model: whose function it is.
        function: what Keras made.

    Attributes:
        before_first: called once, before the first step, when model and optimizer have their variables.
        look_at_first: called before those with model and iterator; returns the iterator for the first step.
    """

    def __init__(self, model: Any, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.before_first: list[Callable[[], None]] = []
        self.look_at_first: Callable[[Any, Any], Any] | None = None
        self._model = model

    def __call__(self, iterator: Any, *args: Any) -> Any:
        if self.look_at_first is not None:
            look, self.look_at_first = self.look_at_first, None
            iterator = look(self._model, iterator)
        if self.before_first:
            iterator = create_variables(self._model, iterator)
            waiting, self.before_first = self.before_first, []
            for action in waiting:
                action()
        try:
            return self.function(iterator, *args)
        except tf.errors.OpError as error:
            cause = world.last_error()
            if cause is None or type(cause).__name__ not in str(error):
                raise
            # The collective runs inside an operation, and TensorFlow has put an error of its own around hvdx's.
            raise type(cause)(str(cause)) from error


def install(model: Any) -> StepFunction:
    """Wrap the model's functions, unless they are, and return the wrapped train function."""
    for make in (model.make_train_function, model.make_test_function):
        make()
    for name in NAMES:
        current = getattr(model, name)
        if current is not None and not isinstance(current, StepFunction):
            setattr(model, name, StepFunction(model, current))
    return model.train_function


def remove(model: Any) -> None:
    """Give the model its own functions back."""
    for name in NAMES:
        current = getattr(model, name, None)
        if isinstance(current, StepFunction):
            setattr(model, name, current.function)


def when_built(model: Any, action: Callable[[], None]) -> bool:
    """Call `action` as soon as model and optimizer have all their variables: now, or just before the first step.

    Returns:
        Whether it was called now.
    """
    if keras_api.is_built(model) and not _own_step_makes_variables(model):
        _build_optimizer(model)
        action()
        return True
    install(model).before_first.append(action)
    return False


def create_variables(model: Any, iterator: Any) -> Any:
    """Create the variables of model and optimizer as the first step would, without making it.

    Args:
        model: a model that Keras builds in its first step.
        iterator: what the train function is called with.

    Returns:
        The iterator to call the train function with instead.

    Raises:
        ConfigurationError: hvdx cannot build this model.
    """
    own_step = keras_api.overrides_train_step(model)
    try:
        if model.run_eagerly and not own_step:
            batch = next(iterator)
            iterator = _FromBatch(batch, iterator)
            model(keras_api.inputs_of(batch))
        else:
            # Traced and never run: layers and optimizers create their variables outside the graph.
            step = model.train_step if own_step else _forward(model)
            tf.function(step).get_concrete_function(keras_api.without_optionals(iterator.element_spec))
    except HvdxError:
        raise
    except Exception as error:
        parts = [layer for layer in keras_api.layers(model) if layer is not model]
        if parts and all(layer.built for layer in parts):
            log.debug("%s itself cannot be built (%s), but all its parts are.", type(model).__name__, error)
        else:
            raise ConfigurationError(
                f"{type(model).__name__} has no variables before its first step, and building it failed, so the ranks "
                f"cannot start from the same weights: {error}\nCall the model on one batch before fit."
            ) from error
    _build_optimizer(model)
    return iterator


def _forward(model: Any) -> Callable[[Any], Any]:
    def forward(data: Any) -> Any:
        model(keras_api.inputs_of(data))
        return tf.constant(0)  # what the model returns need not be something a graph can return

    return forward


def _own_step_makes_variables(model: Any) -> bool:
    """Return whether a train_step of the user's own may give an optimizer other variables than the model's."""
    unbuilt = [one for one in keras_api.optimizers(model) if not keras_api.optimizer_is_built(one)]
    return bool(unbuilt) and keras_api.overrides_train_step(model)


def _build_optimizer(model: Any) -> None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not keras_api.overrides_train_step(model):
        keras_api.build_optimizer(optimizer, model.trainable_variables)


class _FromBatch:
    """An iterator that first returns a batch which was taken from it."""

    def __init__(self, batch: Any, rest: Any) -> None:
        self._all = chain([batch], rest)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._all)
