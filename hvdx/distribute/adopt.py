"""Optimizers that are used under a strategy of hvdx become distributed by themselves.

Keras 3 asks a strategy to reduce after it has clipped. So the classes' `apply` is adapted, once, when the first
strategy is made: in a replica of hvdx's an optimizer is wrapped in place before its first update, as
`hvd.DistributedOptimizer` does it; anywhere else `apply` is what it was. tf_keras and Keras 2 ask before they clip, and
need nothing.
"""

from __future__ import annotations

from typing import Any

from hvdx import keras_api
from hvdx.training.loss_scale import adapt_loss_scaling
from hvdx.training.under_strategy import are_in_hand, building, current
from hvdx.training.xla import is_distributed, switch_auto_off


def adapt_keras_3() -> None:
    """Adapt the optimizers of Keras 3, where it has been imported."""
    for cls in keras_api.classes_with_apply_of_keras_3():
        keras_api.change_method(cls, "apply", _adopting)
    keras_api.change_method(keras_api.tensorflow_trainer_class_of_keras_3(), "_maybe_symbolic_build", _announced)
    adapt_loss_scaling()
    switch_auto_off()


def _adopting(original: Any) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        strategy = current()
        if strategy is None or is_distributed(self) or are_in_hand():
            return original(self, grads, trainable_variables)
        strategy.extended.hvdx_adopt(self)
        return self.apply(grads, trainable_variables)

    return apply


def _announced(original: Any) -> Any:
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        with building():
            return original(self, *args, **kwargs)

    return build
