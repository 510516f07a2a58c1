"""What a model_fn is told (its mode) and what it returns (EstimatorSpec)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from hvdx.errors import ConfigurationError

from .checks import check_hooks, check_tensor, parameters_of
from .eval_metrics import checked_metrics
from .export_outputs import checked_export_outputs

_MODEL_FN_ARGUMENTS = frozenset({"features", "labels", "mode", "params", "config", "self"})


class ModeKeys:
    """For what a model_fn is called."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


class _Fields(NamedTuple):
    mode: str
    predictions: Any
    loss: Any
    train_op: Any
    eval_metric_ops: dict[str, tuple[Any, Any]]
    export_outputs: Any
    training_chief_hooks: tuple[Any, ...]
    training_hooks: tuple[Any, ...]
    scaffold: Any
    evaluation_hooks: tuple[Any, ...]
    prediction_hooks: tuple[Any, ...]


class EstimatorSpec(_Fields):
    """The model that a model_fn has built.

    Args:
        mode: a value of `ModeKeys`.
        predictions: a tensor or a dict of tensors; needed to predict.
        loss: a scalar tensor (or one of shape [1]); needed to train and to evaluate.
        train_op: what one training step runs; needed to train. It must increment the global step.
        eval_metric_ops: dict of names to `(value, update_op)`, or to metrics of tf_keras that were updated.
        export_outputs: dict of signature names to outputs of `hvdx.estimator.export`; by default the predictions.
        training_chief_hooks: hooks that run on the chief only, while training.
        training_hooks: hooks that run while training.
        scaffold: a `tf.compat.v1.train.Scaffold` for initialization and saving.
        evaluation_hooks: hooks that run while evaluating.
        prediction_hooks: hooks that run while predicting.

    Raises:
        ConfigurationError: what the mode needs is missing, of another type, or of another graph.
        UnsupportedError: a metric of Keras 3.
    """

    __slots__ = ()

    def __new__(
        cls,
        mode: str,
        predictions: Any = None,
        loss: Any = None,
        train_op: Any = None,
        eval_metric_ops: Any = None,
        export_outputs: Any = None,
        training_chief_hooks: Any = None,
        training_hooks: Any = None,
        scaffold: Any = None,
        evaluation_hooks: Any = None,
        prediction_hooks: Any = None,
    ) -> EstimatorSpec:
        train_op = _checked_train_op(train_op, mode)
        loss = _checked_loss(loss, mode)
        predictions = _checked_predictions(predictions, mode)
        if mode == ModeKeys.PREDICT:
            export_outputs = checked_export_outputs(export_outputs, predictions)
        return super().__new__(
            cls,
            mode=mode,
            predictions=predictions,
            loss=loss,
            train_op=train_op,
            eval_metric_ops=checked_metrics(eval_metric_ops),
            export_outputs=export_outputs,
            training_chief_hooks=check_hooks(training_chief_hooks, "an EstimatorSpec"),
            training_hooks=check_hooks(training_hooks, "an EstimatorSpec"),
            scaffold=_checked_scaffold(scaffold),
            evaluation_hooks=check_hooks(evaluation_hooks, "an EstimatorSpec"),
            prediction_hooks=check_hooks(prediction_hooks, "an EstimatorSpec"),
        )

    def _replace(self, **changed: Any) -> EstimatorSpec:
        """Return a checked copy with some fields changed, never the mode."""
        if changed.get("mode", self.mode) != self.mode:
            raise ConfigurationError(
                f"The mode of an EstimatorSpec cannot change: it is {self.mode!r}, received {changed['mode']!r}."
            )
        return EstimatorSpec(**{**self._asdict(), **changed})


def check_model_fn(model_fn: Callable[..., Any] | None, params: Any) -> None:
    """Refuse a model_fn that an Estimator cannot call.

    Raises:
        ConfigurationError: no callable, no `features`, unknown arguments, or params that it does not take.
    """
    if not callable(model_fn):
        raise ConfigurationError(f"model_fn must be a function of features, labels and mode; received {model_fn!r}.")
    parameters = parameters_of(model_fn)
    unknown = sorted(n for n, p in parameters.items() if n not in _MODEL_FN_ARGUMENTS and p.kind != p.KEYWORD_ONLY)
    if "features" not in parameters:
        raise ConfigurationError(f"model_fn {model_fn!r} has no argument `features`; it takes {sorted(parameters)}.")
    if unknown:
        raise ConfigurationError(
            f"model_fn {model_fn!r} takes {unknown}, which an Estimator does not know. It may take features, labels, "
            "mode, params and config; bind others with functools.partial."
        )
    if params is not None and "params" not in parameters:
        raise ConfigurationError(f"params were given, but model_fn {model_fn!r} does not take `params`.")
    if params is None and "params" in parameters:
        tf.compat.v1.logging.warn("model_fn %s takes params, but the Estimator was given none.", model_fn)


def _checked_train_op(train_op: Any, mode: str) -> Any:
    if train_op is None:
        if mode == ModeKeys.TRAIN:
            raise ConfigurationError("The EstimatorSpec for training has no train_op; give optimizer.minimize(...).")
        return None
    check_tensor(train_op, "train_op", or_operation=True)
    return train_op.op if isinstance(train_op, tf.Variable) else train_op


def _checked_loss(loss: Any, mode: str) -> Any:
    if loss is None:
        if mode in (ModeKeys.TRAIN, ModeKeys.EVAL):
            raise ConfigurationError(f"The EstimatorSpec for mode {mode!r} has no loss.")
        return None
    check_tensor(loss, "loss")
    if loss.shape.num_elements() not in (None, 1):
        raise ConfigurationError(f"loss must be one number; received shape {loss.shape}. Reduce it with a mean or sum.")
    return loss if loss.shape.is_compatible_with([]) else tf.reshape(loss, [])


def _checked_predictions(predictions: Any, mode: str) -> Any:
    if predictions is None:
        if mode == ModeKeys.PREDICT:
            raise ConfigurationError("The EstimatorSpec for prediction has no predictions.")
        return {}
    if isinstance(predictions, dict):
        return {key: check_tensor(value, f"predictions[{key!r}]") for key, value in predictions.items()}
    return check_tensor(predictions, "predictions")


def _checked_scaffold(scaffold: Any) -> Any:
    if scaffold is None:
        return tf.compat.v1.train.Scaffold()
    if not isinstance(scaffold, tf.compat.v1.train.Scaffold):
        raise ConfigurationError(f"scaffold must be a tf.compat.v1.train.Scaffold; received {scaffold!r}.")
    return scaffold
