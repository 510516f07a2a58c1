"""What of tf.estimator is not offered where TensorFlow has none, and what to use instead."""

from __future__ import annotations

from typing import NoReturn

from hvdx.errors import UnsupportedError

_CANNED = frozenset({
    "BaselineClassifier", "BaselineEstimator", "BaselineRegressor", "BoostedTreesClassifier", "BoostedTreesEstimator",
    "BoostedTreesRegressor", "DNNClassifier", "DNNEstimator", "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator", "DNNLinearCombinedRegressor", "DNNRegressor", "LinearClassifier", "LinearEstimator",
    "LinearRegressor",
})  # fmt: skip
_HEADS = frozenset({
    "BinaryClassHead", "Head", "LogisticRegressionHead", "MultiClassHead", "MultiHead", "MultiLabelHead",
    "PoissonRegressionHead", "RegressionHead",
})  # fmt: skip
_OTHERS = {
    "add_metrics": "put the metric into the eval_metric_ops of the model_fn",
    "classifier_parse_example_spec": "write the dict of tf.io.FixedLenFeature by hand",
    "regressor_parse_example_spec": "write the dict of tf.io.FixedLenFeature by hand",
    "experimental": "write the hook yourself; stopping early is a SessionRunHook that calls request_stop()",
    "inputs": "write an input_fn that returns a tf.data.Dataset",
    "tpu": "use Keras with tf.distribute.TPUStrategy",
}
_LAST = "or stay on TensorFlow 2.15, the last that has tf.estimator"


def left_out(name: str) -> NoReturn:
    """Refuse a name that `hvdx.estimator` does not offer on this TensorFlow; for a module's `__getattr__`.

    Raises:
        UnsupportedError: it is a name of tf.estimator; the message names the way out.
        AttributeError: it is no name of tf.estimator either.
    """
    if name in _CANNED:
        instead = "write a model_fn for hvdx.estimator.Estimator, build the model in Keras"
    elif name in _HEADS:
        instead = "compute the loss, predictions and metrics in the model_fn, with tf.compat.v1.losses and metrics"
    elif name in _OTHERS:
        instead = _OTHERS[name]
    else:
        raise AttributeError(f"module 'hvdx.estimator' has no attribute {name!r}")
    raise UnsupportedError(
        f"hvdx.estimator.{name} is left out where TensorFlow has no tf.estimator: {instead}, {_LAST}."
    )
