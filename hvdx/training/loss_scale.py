"""Loss scaling under several ranks: the test for overflow is global, so that all ranks skip the same steps.

tf_keras and Keras 2 aggregate before they test, so an infinity has reached every rank by then. Keras 3 tests first, in
`LossScaleOptimizer.check_finite`; `model.compile` puts that class around an optimizer by itself under mixed_float16,
which is why the class is adapted and not the object.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdx import keras_api, world
from hvdx.comm.communicator import Label
from hvdx.comm.reduce_op import ReduceOp
from hvdx.training.xla import is_distributed


def make_finite_test_global() -> None:
    """Adapt Keras 3's LossScaleOptimizer; it behaves as before around optimizers that are not distributed."""
    cls = keras_api.loss_scale_class_of_keras_3()
    if cls is None or getattr(cls.check_finite, "hvdx", False):
        return
    original = cls.check_finite

    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        if not is_distributed(self) or world.size() == 1:
            return finite
        label = Label("overflow tests of loss scaling", ("all gradients finite",))
        [everywhere] = world.communicator().grouped_allreduce([tf.cast(finite, tf.int32)], ReduceOp.MIN, label, 0)
        return tf.cast(everywhere, tf.bool)

    check_finite.hvdx = True  # type: ignore[attr-defined]
    cls.check_finite = check_finite
