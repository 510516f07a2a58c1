"""Loss scaling under several ranks: the test for overflow is global, so that all ranks skip the same steps.

tf_keras and Keras 2 aggregate before they test, so an infinity has reached every rank by then; but they drop gradients
that are None before. Keras 3 tests first, in `LossScaleOptimizer.check_finite`. `model.compile` puts these classes
around an optimizer by itself under mixed_float16, which is why the classes are adapted and not the objects; around
optimizers that are not distributed they behave as before.
"""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from hvdx import keras_api, world
from hvdx.comm.communicator import Label
from hvdx.comm.reduce_op import ReduceOp
from hvdx.training.under_strategy import reduces_by_itself
from hvdx.training.xla import is_distributed


def adapt_loss_scaling() -> None:
    """Adapt the LossScaleOptimizer classes of all Kerases that have been imported."""
    keras_api.change_method(keras_api.loss_scale_class_of_keras_3(), "check_finite", _global_finite_test)
    for cls in keras_api.loss_scale_classes_of_keras_2():
        keras_api.change_method(cls, "apply_gradients", _keeping_missing_gradients)


def _global_finite_test(original: Any) -> Any:
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        if not is_distributed(self) or world.size() == 1 or reduces_by_itself():
            return finite
        label = Label("overflow tests of loss scaling", ("all gradients finite",))
        [everywhere] = world.communicator().grouped_allreduce([tf.cast(finite, tf.int32)], ReduceOp.MIN, label, 0)
        return tf.cast(everywhere, tf.bool)

    return check_finite


def _keeping_missing_gradients(original: Any) -> Any:
    """Let the optimizer inside know all gradients of an update, also those that are None."""
    parameters = inspect.signature(original)

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_distributed(self) or reduces_by_itself():
            return original(self, grads_and_vars, *args, **kwargs)
        given = parameters.bind(self, grads_and_vars, *args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        inner = keras_api.inner_optimizer(self)
        pairs = inner._hvdx_filled(list(grads_and_vars))
        reduces = not given.get("skip_gradients_aggregation") and given.get("experimental_aggregate_gradients", True)
        if reduces and inner._hvdx_has_nothing(pairs):
            return inner.iterations
        with inner._hvdx_given(pairs):
            return original(self, pairs, *args, **kwargs)

    return apply_gradients
