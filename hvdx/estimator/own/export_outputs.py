"""What a model offers for serving: the kinds of outputs that become signatures of a SavedModel."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigurationError

DEFAULT_SIGNATURE = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY


class ExportOutput(abc.ABC):
    """One output of a model, which can be turned into a signature."""

    @abc.abstractmethod
    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> Any:
        """Return the SignatureDef with these inputs.

        Raises:
            ConfigurationError: this kind of output cannot be served from these inputs.
        """


class PredictOutput(ExportOutput):
    """Any tensors, by name.

    Args:
        outputs: a tensor (it gets the name `output`) or a dict of names to tensors.
    """

    def __init__(self, outputs: Any) -> None:
        named = outputs if isinstance(outputs, Mapping) else {"output": outputs}
        self.outputs: dict[str, Any] = {}
        for key, value in named.items():
            name = "/".join(key) if isinstance(key, tuple) else key
            if not isinstance(name, str):
                raise ConfigurationError(f"The names of a PredictOutput must be strings; received {key!r}.")
            if not isinstance(value, tf.Tensor):
                raise ConfigurationError(f"Output {name!r} of a PredictOutput must be a tensor; received {value!r}.")
            self.outputs[name] = value

    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> Any:
        return tf.compat.v1.saved_model.predict_signature_def(dict(receiver_tensors), self.outputs)


class ClassificationOutput(ExportOutput):
    """Scores and class labels, served from serialized tf.train.Example.

    Args:
        scores: a float tensor, one score a class; may be left out if `classes` is given.
        classes: a string tensor of labels; may be left out if `scores` is given.
    """

    def __init__(self, scores: Any = None, classes: Any = None) -> None:
        if scores is None and classes is None:
            raise ConfigurationError("A ClassificationOutput needs scores or classes; received neither.")
        if scores is not None and not (isinstance(scores, tf.Tensor) and scores.dtype.is_floating):
            raise ConfigurationError(f"scores of a ClassificationOutput must be a float tensor; received {scores!r}.")
        if classes is not None and not (isinstance(classes, tf.Tensor) and classes.dtype == tf.string):
            raise ConfigurationError(
                f"classes of a ClassificationOutput must be a string tensor; received {classes!r}. "
                "Write tf.strings.as_string(ids) if you have numbers."
            )
        self.scores = scores
        self.classes = classes

    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> Any:
        examples = _only_string_input(receiver_tensors, "ClassificationOutput")
        return tf.compat.v1.saved_model.classification_signature_def(examples, self.classes, self.scores)


class RegressionOutput(ExportOutput):
    """Predicted values, served from serialized tf.train.Example.

    Args:
        value: a float tensor.
    """

    def __init__(self, value: Any) -> None:
        if not (isinstance(value, tf.Tensor) and value.dtype.is_floating):
            raise ConfigurationError(f"value of a RegressionOutput must be a float tensor; received {value!r}.")
        self.value = value

    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> Any:
        examples = _only_string_input(receiver_tensors, "RegressionOutput")
        return tf.compat.v1.saved_model.regression_signature_def(examples, self.value)


def checked_export_outputs(export_outputs: Any, predictions: Any) -> dict[str, ExportOutput]:
    """Return the outputs by signature name with the default signature among them.

    Args:
        export_outputs: what the model_fn gave; None makes one PredictOutput of the predictions.
        predictions: a tensor, or a dict of them.

    Raises:
        ConfigurationError: no dict of ExportOutputs, or several of them and none under the default name.
    """
    if export_outputs is None:
        return {DEFAULT_SIGNATURE: PredictOutput(predictions)}
    if not isinstance(export_outputs, dict):
        raise ConfigurationError(f"export_outputs must be a dict of names to outputs; received {export_outputs!r}.")
    for name, output in export_outputs.items():
        if not isinstance(output, ExportOutput):
            raise ConfigurationError(
                f"export_outputs[{name!r}] must be a PredictOutput, ClassificationOutput or RegressionOutput "
                f"of hvdx.estimator.export; received {output!r}."
            )
    outputs = dict(export_outputs)
    if len(outputs) == 1:
        outputs.setdefault(DEFAULT_SIGNATURE, next(iter(outputs.values())))
    if len(outputs) > 1 and DEFAULT_SIGNATURE not in outputs:
        raise ConfigurationError(
            f"One of several export_outputs must be named {DEFAULT_SIGNATURE!r} "
            f"(tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY); received {sorted(map(str, outputs))}."
        )
    return outputs


def _only_string_input(receiver_tensors: Mapping[str, Any], kind: str) -> Any:
    inputs = list(receiver_tensors.values())
    if len(inputs) != 1 or inputs[0].dtype != tf.string:
        raise ConfigurationError(
            f"A {kind} is served from one string input (serialized tf.train.Example); this receiver has "
            f"{sorted(receiver_tensors)}. Use build_parsing_serving_input_receiver_fn, or a PredictOutput."
        )
    return inputs[0]
