"""The Estimator on several ranks: `train_and_evaluate`, hooks and input helpers, for whichever Estimator there is.

Where TensorFlow still has `tf.estimator` (up to 2.15) the names here are its own; on newer ones they are those of
`hvdx.estimator.own`, of the same shape. So a program that says `from hvdx import estimator` runs on both.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdx.estimator.executor import train_and_evaluate
    from hvdx.estimator.hooks import BroadcastGlobalVariablesHook, LearningRateWarmupHook, MetricAverageHook
    from hvdx.estimator.inputs import input_context, shard_input_fn

_HOMES = {
    "executor": "train_and_evaluate",
    "hooks": "BroadcastGlobalVariablesHook LearningRateWarmupHook MetricAverageHook",
    "inputs": "input_context shard_input_fn",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "BroadcastGlobalVariablesHook",
    "LearningRateWarmupHook",
    "MetricAverageHook",
    "input_context",
    "shard_input_fn",
    "train_and_evaluate",
]


def has_tf_estimator() -> bool:
    """Return whether this TensorFlow still has `tf.estimator`."""
    return importlib.util.find_spec("tensorflow_estimator") is not None


def __getattr__(name: str) -> Any:
    """Import a name when it is first used; those of the Estimator API from where this TensorFlow has them."""
    if name in _HOME:
        value = getattr(importlib.import_module(f"hvdx.estimator.{_HOME[name]}"), name)
    elif name.startswith("_"):
        raise AttributeError(f"module 'hvdx.estimator' has no attribute {name!r}")
    else:
        source = importlib.import_module(f"hvdx.estimator.{'of_tensorflow' if has_tf_estimator() else 'own'}")
        value = getattr(source, name, None)
        if value is None:
            value = source.left_out(name)
    globals()[name] = value
    return value
