"""Optimizers that are used under a strategy of hvdx become distributed by themselves.

Keras 3 asks a strategy to reduce after it has clipped. So the classes' `apply` is adapted, once, when the first
strategy is made. In a replica of a strategy that reduces by itself, the outermost `apply` begins with that. In one of
another strategy of hvdx's, an optimizer is wrapped in place before its first update, as `hvd.DistributedOptimizer` does
it. Anywhere else `apply` is what it was. tf_keras and Keras 2 ask before they clip, and need nothing.
"""

from __future__ import annotations

from typing import Any

from hvdx import keras_api
from hvdx.distribute.batch_norm import adapt_batch_norm
from hvdx.distribute.written_files import adapt_written_files
from hvdx.training.loss_scale import adapt_loss_scaling
from hvdx.training.under_strategy import (
    are_in_hand,
    building,
    current,
    given_global,
    is_of_hvdx,
    reduces_by_itself,
)
from hvdx.training.xla import is_distributed, switch_auto_off


def adapt_keras_3() -> None:
    """Adapt the optimizers of Keras 3, where it has been imported."""
    for cls in keras_api.classes_with_apply_of_keras_3():
        keras_api.change_method(cls, "apply", _adopting)
    keras_api.change_method(keras_api.tensorflow_trainer_class_of_keras_3(), "_maybe_symbolic_build", _announced)
    adapt_loss_scaling()
    adapt_batch_norm()
    adapt_written_files()
    switch_auto_off()


def _adopting(original: Any) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        strategy = current()
        if strategy is None:
            return original(self, grads, trainable_variables)
        grads = list(grads)
        with given_global(grads):
            return _applied(strategy, original, self, grads, trainable_variables)

    return apply


def _applied(strategy: Any, original: Any, optimizer: Any, gradients: list[Any], variables: Any) -> Any:
    """Make an update in a replica of a strategy of hvdx's."""
    if _has_servers(strategy) and is_distributed(optimizer):
        strategy.extended.hvdx_adopt(optimizer)  # which refuses it
    if are_in_hand():
        return original(optimizer, gradients, variables)
    if reduces_by_itself():
        return strategy.extended.hvdx_update(original, optimizer, gradients, variables)
    if is_distributed(optimizer) or is_served(optimizer):
        return original(optimizer, gradients, variables)
    strategy.extended.hvdx_adopt(optimizer)
    return optimizer.apply(gradients, variables)


def adapt_keras_2() -> None:
    """Adapt the optimizers of tf_keras and Keras 2, where they have been imported, for strategies with servers."""
    for cls in keras_api.classes_with_apply_gradients_of_keras_2():
        keras_api.change_method(cls, "apply_gradients", _served)


def is_served(optimizer: Any) -> bool:
    """Return whether parameter servers make the updates of an optimizer, or of the one inside."""
    return hasattr(type(keras_api.inner_optimizer(optimizer)), "hvdx_client")


def _has_servers(strategy: Any) -> bool:
    return bool(getattr(strategy.extended, "hvdx_has_servers", False))


def _served(original: Any) -> Any:
    def apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = current()
        if strategy is None or not _has_servers(strategy) or is_served(self):
            return original(self, *args, **kwargs)
        strategy.extended.hvdx_adopt(self)
        return self.apply_gradients(*args, **kwargs)

    return apply_gradients


def _announced(original: Any) -> Any:
    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        if iterator is not None and is_of_hvdx(self.distribute_strategy) and keras_api.is_built_for_fit(self):
            # Keras takes a batch all the same, and drops the iterator: a waste, and TensorFlow's for several devices at
            # times ends the process when it is dropped before its end.
            return None
        with building():
            return original(self, iterator, data_batch)

    return build
