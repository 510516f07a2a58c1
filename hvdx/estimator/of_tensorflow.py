"""The names of `tf.estimator`, where TensorFlow has it, and the one that hvdx adds: `Estimator.from_keras`."""

from __future__ import annotations

from typing import Any, NoReturn

import tensorflow as tf

from hvdx.estimator.own.from_keras import estimator_from_keras


class Estimator(tf.estimator.Estimator):
    """`tf.estimator.Estimator`, which can also be made from a Keras model."""

    @classmethod
    def from_keras(cls, keras_model: Any, model_dir: str | None = None, config: Any = None, **options: Any) -> Any:
        """Return an Estimator that trains a compiled Keras model from the weights it has.

        `tf.keras.estimator.model_to_estimator` makes an optimizer of its own, which would not be distributed any more.
        """
        spec = tf.estimator.EstimatorSpec
        return estimator_from_keras(cls, keras_model, model_dir, config, spec_class=spec, **options)


def __getattr__(name: str) -> Any:
    return getattr(tf.estimator, name)


def left_out(name: str) -> NoReturn:
    """Raise for a name that tf.estimator does not have."""
    raise AttributeError(f"module 'hvdx.estimator' has no attribute {name!r}, and neither has tf.estimator")
