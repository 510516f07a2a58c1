"""Which Keras an optimizer or a model is of, where each lets gradients be made global, and its classes."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from typing import Any

from hvdx.errors import OptimizerError


class Family(enum.Enum):
    """Whose optimizer it is; each family has its own hook (see `training/hooks.py`)."""

    KERAS_3 = "Keras 3"
    KERAS_3_MULTI = "Keras 3, which hands its gradients to others"
    KERAS_2 = "tf_keras or Keras 2"
    LEGACY = "a legacy optimizer of tf_keras or Keras 2"
    V1 = "tf.compat.v1.train"


BASES = {
    "keras.src.optimizers.base_optimizer.BaseOptimizer": Family.KERAS_3,
    "tf_keras.src.optimizers.optimizer.Optimizer": Family.KERAS_2,
    "keras.src.optimizers.optimizer.Optimizer": Family.KERAS_2,
    "tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2": Family.LEGACY,
    "keras.src.optimizers.legacy.optimizer_v2.OptimizerV2": Family.LEGACY,
    "tensorflow.python.training.optimizer.Optimizer": Family.V1,
}
_HOOKS = {
    Family.KERAS_3: ("apply", "_clip_gradients"),
    Family.KERAS_3_MULTI: ("apply", "optimizers"),
    Family.KERAS_2: ("apply_gradients", "aggregate_gradients"),
    Family.LEGACY: ("apply_gradients", "_aggregate_gradients"),
    Family.V1: ("apply_gradients", "compute_gradients"),
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
    if "keras.src.optimizers.multi_optimizer.MultiOptimizer" in names:
        found: Family | None = Family.KERAS_3_MULTI
    elif "keras.src.optimizers.base_optimizer.BaseOptimizer" in names:
        found = Family.KERAS_3  # Keras 3 has a class "optimizer.Optimizer" too
    else:
        found = next((BASES[name] for name in names if name in BASES), None)
    if found is None:
        raise OptimizerError(_no_optimizer(optimizer))
    missing = [name for name in _HOOKS[found] if not hasattr(type(optimizer), name)]
    if missing:
        raise OptimizerError(
            f"{type(optimizer).__name__} of {found.value} has no method {missing[0]}, where hvdx reduces the gradients."
            " This version of Keras is not supported; see the table in the README."
        )
    return found


def _no_optimizer(value: Any) -> str:
    if isinstance(value, type):
        return (
            f"DistributedOptimizer takes an optimizer, not a class. Write {value.__name__}(...). Received: {value!r}."
        )
    if isinstance(value, str):
        hint = f"Write keras.optimizers.get({value!r})"
        return f"DistributedOptimizer takes an optimizer object. {hint}. Received: {value!r}."
    hint = " A tf.GradientTape is wrapped with hvd.DistributedGradientTape." if "Tape" in type(value).__name__ else ""
    return (
        "DistributedOptimizer takes an optimizer of Keras 3, tf_keras, Keras 2 or tf.compat.v1.train."
        f"{hint} Received: {value!r}."
    )


def is_loss_scale_optimizer(optimizer: Any) -> bool:
    """Return whether it is the LossScaleOptimizer of any Keras, which wraps another optimizer."""
    return any(name.rsplit(".", 1)[-1] in _LOSS_SCALE_NAMES for name in base_names(optimizer))


_LOSS_SCALE_NAMES = {"LossScaleOptimizer", "LossScaleOptimizerV3", "BaseLossScaleOptimizer"}


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that does the update: the inner one of a LossScaleOptimizer, else itself."""
    while is_loss_scale_optimizer(optimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def save_as(known: type, other: type) -> None:
    """Make every Keras write objects of `other` to files under the name that it writes for `known`."""
    for module, attribute in _SAVED_NAMES:
        names = getattr(sys.modules.get(module), attribute, {})
        if known in names:
            names[other] = names[known]
    for attribute in [name for name in vars(known) if name.endswith(("_api_names", "_api_names_v1"))]:
        setattr(other, attribute, vars(known)[attribute])  # tf_keras and Keras 2 look for it in the class itself


_SAVED_NAMES = (
    ("keras.src.api_export", "REGISTERED_OBJS_TO_NAMES"),
    ("keras.src.saving.object_registration", "GLOBAL_CUSTOM_NAMES"),
    ("keras.src.saving.object_registration", "_GLOBAL_CUSTOM_NAMES"),
    ("tf_keras.src.saving.object_registration", "_GLOBAL_CUSTOM_NAMES"),
)
"""The tables in which each Keras looks up the name of a class: its own classes, and those that a user registered."""


def model_family(model: Any) -> str | None:
    """Return "keras 3", "keras 2" or None, for a model of Keras 3, of tf_keras or Keras 2, or something else."""
    return next((MODEL_BASES[name] for name in base_names(model) if name in MODEL_BASES), None)


MODEL_BASES = {
    "keras.src.models.model.Model": "keras 3",
    "keras.src.trainers.trainer.Trainer": "keras 3",
    "tf_keras.src.engine.training.Model": "keras 2",
    "keras.src.engine.training.Model": "keras 2",
}


def loss_scale_class_of_keras_3() -> Any:
    """Return Keras 3's LossScaleOptimizer class where Keras 3 has been imported, else None."""
    module = sys.modules.get("keras.src.optimizers.loss_scale_optimizer")
    cls = getattr(module, "LossScaleOptimizer", None)
    return cls if cls is not None and hasattr(cls, "check_finite") else None


def classes_with_apply_of_keras_3() -> list[Any]:
    """Return the optimizer classes of Keras 3 that make an update by an `apply` of their own, where it is imported."""
    names = {
        "keras.src.optimizers.base_optimizer": "BaseOptimizer",
        "keras.src.optimizers.loss_scale_optimizer": "LossScaleOptimizer",
        "keras.src.optimizers.multi_optimizer": "MultiOptimizer",
    }
    found = [getattr(sys.modules.get(module), name, None) for module, name in names.items()]
    return [cls for cls in found if cls is not None and "apply" in vars(cls)]


def classes_with_apply_gradients_of_keras_2() -> list[Any]:
    """Return the base classes of optimizers of tf_keras and Keras 2, new, legacy and for loss scaling, if imported."""
    bases = [name.rpartition(".") for name, kind in BASES.items() if kind in (Family.KERAS_2, Family.LEGACY)]
    found = [getattr(sys.modules.get(module), name, None) for module, _, name in bases]
    known = [cls for cls in found if cls is not None and not hasattr(cls, "apply")]  # Keras 3 has one of that name
    return [*known, *loss_scale_classes_of_keras_2()]


def loss_scale_classes_of_keras_2() -> list[Any]:
    """Return the LossScaleOptimizer classes, new and legacy, of tf_keras and Keras 2 where they have been imported."""
    names = ("tf_keras.src.mixed_precision.loss_scale_optimizer", "keras.src.mixed_precision.loss_scale_optimizer")
    modules = [sys.modules[name] for name in names if name in sys.modules]
    return [
        vars(module)[name]
        for module in modules
        for name in sorted(_LOSS_SCALE_NAMES)
        if name in vars(module) and "apply_gradients" in vars(vars(module)[name])
    ]


def tensorflow_trainer_class_of_keras_3() -> Any:
    """Return Keras 3's Trainer class for TensorFlow, where it has been imported and builds models from a batch."""
    cls = getattr(sys.modules.get("keras.src.backend.tensorflow.trainer"), "TensorFlowTrainer", None)
    return cls if cls is not None and hasattr(cls, "_maybe_symbolic_build") else None


def callback_class_of_keras_3(name: str) -> Any:
    """Return a class of `keras.callbacks` of Keras 3 where Keras 3 has been imported, else None."""
    if "keras.src.trainers.trainer" not in sys.modules:
        return None
    return getattr(sys.modules.get("keras.src.callbacks"), name, None)


def batch_normalization_class_of_keras_3() -> Any:
    """Return the layer's class where Keras 3 has been imported, else None."""
    module = sys.modules.get("keras.src.layers.normalization.batch_normalization")
    cls = getattr(module, "BatchNormalization", None)
    return cls if cls is not None and "keras.src.trainers.trainer" in sys.modules else None


def trainer_class_of_keras_3() -> Any:
    """Return Keras 3's Trainer class where Keras 3 has been imported, else None."""
    module = sys.modules.get("keras.src.trainers.trainer")
    return getattr(module, "Trainer", None)


def is_optimizer(value: Any) -> bool:
    """Return whether it is an optimizer or a LossScaleOptimizer of any Keras."""
    found = {BASES.get(name) for name in base_names(value)} - {None, Family.V1}
    return is_loss_scale_optimizer(value) or bool(found)
