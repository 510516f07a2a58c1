"""The one file that knows Keras 3 from tf_keras from Keras 2: which optimizer is whose, and where each keeps what.

Everything here looks at the classes of objects it is given, so no Keras is imported that the program has not imported.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from typing import Any

from hvdx.errors import OptimizerError


class Family(enum.Enum):
    """Whose optimizer it is; each family has its own hook (see `training/hooks.py`)."""

    KERAS_3 = "Keras 3"
    KERAS_2 = "tf_keras or Keras 2"
    LEGACY = "a legacy optimizer of tf_keras or Keras 2"


_BASES = {
    "keras.src.optimizers.base_optimizer.BaseOptimizer": Family.KERAS_3,
    "tf_keras.src.optimizers.optimizer.Optimizer": Family.KERAS_2,
    "keras.src.optimizers.optimizer.Optimizer": Family.KERAS_2,
    "tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2": Family.LEGACY,
    "keras.src.optimizers.legacy.optimizer_v2.OptimizerV2": Family.LEGACY,
}
_HOOKS = {
    Family.KERAS_3: ("apply", "_clip_gradients"),
    Family.KERAS_2: ("apply_gradients", "aggregate_gradients"),
    Family.LEGACY: ("apply_gradients", "_aggregate_gradients"),
}


def base_names(value: Any) -> Iterator[str]:
    """Yield the full names of the object's class and of its base classes."""
    for cls in type(value).__mro__:
        yield f"{cls.__module__}.{cls.__qualname__}"


def family(optimizer: Any) -> Family:
    """Return whose optimizer it is.

    Raises:
        OptimizerError: it is no Keras optimizer, or one whose hook is missing in the installed version.
    """
    names = list(base_names(optimizer))
    if "keras.src.optimizers.base_optimizer.BaseOptimizer" in names:
        found: Family | None = Family.KERAS_3  # Keras 3 has a class "optimizer.Optimizer" too
    else:
        found = next((_BASES[name] for name in names if name in _BASES), None)
    if found is None:
        raise OptimizerError(_no_optimizer(optimizer))
    missing = [name for name in _HOOKS[found] if not callable(getattr(type(optimizer), name, None))]
    if missing:
        raise OptimizerError(
            f"{type(optimizer).__name__} of {found.value} has no method {missing[0]}, where hvdx reduces the gradients. "
            "This version of Keras is not supported; see the table in the README."
        )
    return found


def _no_optimizer(value: Any) -> str:
    if isinstance(value, type):
        return (
            f"DistributedOptimizer takes an optimizer, not a class. Write {value.__name__}(...). Received: {value!r}."
        )
    if isinstance(value, str):
        return f"DistributedOptimizer takes an optimizer object. Write keras.optimizers.get({value!r}). Received: {value!r}."
    hint = " A tf.GradientTape is wrapped with hvd.DistributedGradientTape." if "Tape" in type(value).__name__ else ""
    return f"DistributedOptimizer takes an optimizer of Keras 3, tf_keras or Keras 2.{hint} Received: {value!r}."


def is_loss_scale_optimizer(optimizer: Any) -> bool:
    """Return whether it is the LossScaleOptimizer of any Keras, which wraps another optimizer."""
    return any(name.rsplit(".", 1)[-1] in _LOSS_SCALE_NAMES for name in base_names(optimizer))


_LOSS_SCALE_NAMES = {"LossScaleOptimizer", "LossScaleOptimizerV3", "BaseLossScaleOptimizer"}


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that does the update: the inner one of a LossScaleOptimizer, else itself."""
    while is_loss_scale_optimizer(optimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def model_family(model: Any) -> str | None:
    """Return "keras 3", "keras 2" or None, for a model of Keras 3, of tf_keras or Keras 2, or something else."""
    for name in base_names(model):
        if name in {"keras.src.models.model.Model", "keras.src.trainers.trainer.Trainer"}:
            return "keras 3"
        if name in {"tf_keras.src.engine.training.Model", "keras.src.engine.training.Model"}:
            return "keras 2"
    return None


def loss_scale_class_of_keras_3() -> Any:
    """Return Keras 3's LossScaleOptimizer class where Keras 3 has been imported, else None."""
    module = sys.modules.get("keras.src.optimizers.loss_scale_optimizer")
    cls = getattr(module, "LossScaleOptimizer", None)
    return cls if cls is not None and hasattr(cls, "check_finite") else None


def trainer_class_of_keras_3() -> Any:
    """Return Keras 3's Trainer class where Keras 3 has been imported, else None."""
    module = sys.modules.get("keras.src.trainers.trainer")
    return getattr(module, "Trainer", None)
