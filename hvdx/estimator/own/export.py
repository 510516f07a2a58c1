"""What a serving_input_receiver_fn returns, makers of such functions, and the outputs of a served model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from hvdx.errors import ConfigurationError

from .export_outputs import ClassificationOutput, ExportOutput, PredictOutput, RegressionOutput

__all__ = [
    "ClassificationOutput",
    "ExportOutput",
    "PredictOutput",
    "RegressionOutput",
    "ServingInputReceiver",
    "TensorServingInputReceiver",
    "build_parsing_serving_input_receiver_fn",
    "build_raw_serving_input_receiver_fn",
]


class _ReceiverFields(NamedTuple):
    features: Any
    receiver_tensors: dict[str, Any]
    receiver_tensors_alternatives: dict[str, dict[str, Any]] | None


class ServingInputReceiver(_ReceiverFields):
    """Features for the model and the placeholders that are fed, both as dicts.

    Args:
        features: a tensor (it becomes `{"feature": tensor}`) or a dict of them, as the model_fn gets it.
        receiver_tensors: a placeholder (it becomes `{"input": placeholder}`) or a dict of them.
        receiver_tensors_alternatives: dict of names to further groups of placeholders; each gives more signatures.

    Raises:
        ConfigurationError: something else than tensors, or names that are no strings.
    """

    __slots__ = ()

    def __new__(
        cls, features: Any, receiver_tensors: Any, receiver_tensors_alternatives: Any = None
    ) -> ServingInputReceiver:
        return super().__new__(
            cls,
            _named_tensors(features, "feature", "features", (str, int)),
            _named_tensors(receiver_tensors, "input", "receiver_tensors"),
            _checked_alternatives(receiver_tensors_alternatives),
        )


class TensorServingInputReceiver(_ReceiverFields):
    """As `ServingInputReceiver`, for a model_fn that takes one tensor as its features instead of a dict."""

    __slots__ = ()

    def __new__(
        cls, features: Any, receiver_tensors: Any, receiver_tensors_alternatives: Any = None
    ) -> TensorServingInputReceiver:
        _check_tensor(features, "features of a TensorServingInputReceiver")
        return super().__new__(
            cls,
            features,
            _named_tensors(receiver_tensors, "input", "receiver_tensors"),
            _checked_alternatives(receiver_tensors_alternatives),
        )


def build_raw_serving_input_receiver_fn(
    features: dict[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Return a function that serves a model from its features themselves.

    Args:
        features: dict of names to tensors, whose dtypes and shapes (without the batch) the placeholders get.
        default_batch_size: the batch size; None for any.
    """

    def serving_input_receiver_fn() -> ServingInputReceiver:
        placeholders = {
            name: tf.compat.v1.placeholder(
                tensor.dtype, tf.TensorShape([default_batch_size]).concatenate(tensor.shape[1:]), _op_name(tensor)
            )
            for name, tensor in features.items()
        }
        return ServingInputReceiver(placeholders, placeholders)

    return serving_input_receiver_fn


def build_parsing_serving_input_receiver_fn(
    feature_spec: dict[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Return a function that serves a model from serialized tf.train.Example.

    Args:
        feature_spec: dict of names to `tf.io.FixedLenFeature` or `tf.io.VarLenFeature`.
        default_batch_size: the batch size; None for any.
    """

    def serving_input_receiver_fn() -> ServingInputReceiver:
        examples = tf.compat.v1.placeholder(tf.string, [default_batch_size], "input_example_tensor")
        return ServingInputReceiver(tf.io.parse_example(examples, feature_spec), {"examples": examples})

    return serving_input_receiver_fn


def _op_name(tensor: Any) -> str | None:
    try:
        return tensor.op.name
    except AttributeError:  # a tensor that was made eagerly has no operation
        return None


def _check_tensor(value: Any, name: str) -> None:
    if not isinstance(value, (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)):
        raise ConfigurationError(f"{name} must be a tensor, sparse or ragged tensor; received {value!r}.")


def _named_tensors(tensors: Any, default: str, owner: str, keys: tuple[type, ...] = (str,)) -> dict[str, Any]:
    if tensors is None:
        raise ConfigurationError(f"{owner} of a serving input receiver must be given; received None.")
    named = tensors if isinstance(tensors, dict) else {default: tensors}
    for name, tensor in named.items():
        if not isinstance(name, keys):
            raise ConfigurationError(f"The names in {owner} must be strings; received {name!r}.")
        _check_tensor(tensor, f"{owner}[{name!r}]")
    return named


def _checked_alternatives(alternatives: Any) -> dict[str, dict[str, Any]] | None:
    if alternatives is None:
        return None
    if not isinstance(alternatives, dict):
        raise ConfigurationError(f"receiver_tensors_alternatives must be a dict; received {alternatives!r}.")
    owner = "receiver_tensors_alternatives"
    return {name: _named_tensors(group, "input", f"{owner}[{name!r}]") for name, group in alternatives.items()}
