"""The one file that knows Keras 3 from tf_keras from Keras 2: which optimizer is whose, and where each keeps what.

Everything here looks at the classes of objects it is given, so no Keras is imported that the program has not imported.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from hvdx.errors import OptimizerError, UnsupportedError


class Family(enum.Enum):
    """Whose optimizer it is; each family has its own hook (see `training/hooks.py`)."""

    KERAS_3 = "Keras 3"
    KERAS_3_MULTI = "Keras 3, which hands its gradients to others"
    KERAS_2 = "tf_keras or Keras 2"
    LEGACY = "a legacy optimizer of tf_keras or Keras 2"
    V1 = "tf.compat.v1.train"


_BASES = {
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
        found = next((_BASES[name] for name in names if name in _BASES), None)
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
    return next((_MODEL_BASES[name] for name in base_names(model) if name in _MODEL_BASES), None)


_MODEL_BASES = {
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


def trainer_class_of_keras_3() -> Any:
    """Return Keras 3's Trainer class where Keras 3 has been imported, else None."""
    module = sys.modules.get("keras.src.trainers.trainer")
    return getattr(module, "Trainer", None)


# -- optimizers: their state ---------------------------------------------------------------------------------------


def optimizers(model: Any) -> list[Any]:
    """Return the model's optimizer and others that it keeps as attributes, each once."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    unique = {id(value): value for value in found if value is not None and is_optimizer(value)}
    inner = {id(value.inner_optimizer) for value in unique.values() if is_loss_scale_optimizer(value)}
    return [value for key, value in unique.items() if key not in inner]


def is_optimizer(value: Any) -> bool:
    """Return whether it is an optimizer or a LossScaleOptimizer of any Keras."""
    found = {_BASES.get(name) for name in base_names(value)} - {None, Family.V1}
    return is_loss_scale_optimizer(value) or bool(found)


def optimizer_is_built(optimizer: Any) -> bool:
    """Return whether the optimizer has its slots."""
    inner = inner_optimizer(optimizer)
    kind = family(inner)
    if kind is Family.KERAS_3:
        return bool(optimizer.built)
    return bool(inner._hypers_created if kind is Family.LEGACY else getattr(inner, "_built", False))


def build_optimizer(optimizer: Any, variables: Any) -> None:
    """Create the optimizer's slots for these variables, unless it has them."""
    inner = inner_optimizer(optimizer)
    kind = family(inner)
    if kind is Family.LEGACY:
        inner._create_all_weights(list(variables))
    elif not optimizer_is_built(optimizer):
        (optimizer if kind is Family.KERAS_3 else inner).build(list(variables))


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return everything an optimizer changes as it goes: iterations, slots, learning rate, state of loss scaling."""
    inner = inner_optimizer(optimizer)
    kind = family(inner)
    if kind is Family.KERAS_3:
        found = list(optimizer.variables)
    else:
        found = list(inner.weights if kind is Family.LEGACY else inner.variables)
        if learning_rate_is_number(optimizer):
            found.append(inner.learning_rate)
        scale = getattr(optimizer, "_loss_scale", None)
        found += [getattr(scale, name) for name in ("current_loss_scale", "counter") if hasattr(scale, name)]
    return list({id(variable): variable for variable in found}.values())


def learning_rate_is_number(optimizer: Any) -> bool:
    """Return whether the learning rate can be set: it is neither a LearningRateSchedule nor a function."""
    inner = inner_optimizer(optimizer)
    rate = inner._hyper["learning_rate"] if family(inner) is Family.LEGACY else inner._learning_rate
    return hasattr(rate, "assign") or isinstance(rate, int | float)


def learning_rate(optimizer: Any) -> float:
    """Return the learning rate in force."""
    rate = inner_optimizer(optimizer).learning_rate
    return float(rate.numpy() if hasattr(rate, "numpy") else rate)


def set_learning_rate(optimizer: Any, value: float) -> None:
    """Set the learning rate; `learning_rate_is_number` says whether that is possible."""
    inner_optimizer(optimizer).learning_rate = value


def velocities(optimizer: Any) -> list[Any]:
    """Return the momentum buffers that have the learning rate in them: those of SGD and RMSprop with momentum."""
    inner = inner_optimizer(optimizer)
    if not any(name.rsplit(".", 1)[-1] in {"SGD", "RMSprop"} for name in base_names(inner)):
        return []
    if family(inner) is Family.LEGACY:
        return [slots["momentum"] for slots in inner._slots.values() if "momentum" in slots]
    return list(getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or []) if inner.momentum else []


# -- models --------------------------------------------------------------------------------------------------------


def model_classes() -> list[Any]:
    """Return the class that defines `compile` in each Keras that has been imported."""
    found = [getattr(sys.modules.get(name.rpartition(".")[0]), name.rpartition(".")[2], None) for name in _MODEL_BASES]
    return [cls for cls in found if "compile" in vars(cls or object)]


def check_optimizer_of_model(model: Any, optimizer: Any) -> None:
    """Check that model and optimizer are of the same Keras; what is no optimizer is let through.

    Raises:
        OptimizerError: they are not; names both.
    """
    if model_family(model) is None or not is_optimizer(optimizer):
        return
    root = type(model).__mro__[[name in _MODEL_BASES for name in base_names(model)].index(True)].__module__
    names = [name for name in base_names(inner_optimizer(optimizer)) if name in _BASES]
    if names and names[0].split(".")[0] != root.split(".")[0]:
        raise OptimizerError(
            f"The model is one of {root.split('.')[0]} and its optimizer, {type(optimizer).__name__}, one of "
            f"{names[0].split('.')[0]}: take both from the same Keras."
        )


def layers(model: Any) -> list[Any]:
    """Return the model and all layers in it."""
    return list(model._flatten_layers())


def is_built(model: Any) -> bool:
    """Return whether the model and every layer in it have their variables."""
    return all(getattr(layer, "built", True) for layer in layers(model))


def overrides_train_step(model: Any) -> bool:
    """Return whether the model's training step is the user's own."""
    owner = getattr(model.train_step, "__module__", "")
    return not _is_keras(owner)


def inputs_of(data: Any) -> Any:
    """Return x of what a dataset yields: x, (x,), (x, y) or (x, y, sample weights)."""
    return data[0] if isinstance(data, tuple | list) else data


def arrays_of_running_fit() -> list[Any]:
    """Return the arrays that the innermost `fit` now running was called with; nothing where it got a dataset.

    No Keras lets a callback see them, so they are read where they are: among the locals of the calling `fit`.
    """
    import numpy as np
    import tensorflow as tf

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "fit" and _is_keras(frame.f_globals.get("__name__", "")):
            given = (frame.f_locals.get("x"), frame.f_locals.get("y"))
            parts = tf.nest.flatten(given)
            are_arrays = all(part is None or hasattr(part, "__array__") for part in parts)
            return [np.asarray(part) for part in parts if part is not None] if are_arrays else []
        frame = frame.f_back
    return []


def _is_keras(module: str) -> bool:
    return module.startswith(("keras.src.", "tf_keras.src."))


def steps_per_execution(model: Any) -> int:
    """Return how many batches one call of the train function takes."""
    value: Any = getattr(model, "steps_per_execution", None) or getattr(model, "_steps_per_execution", None)
    return int(value.numpy() if hasattr(value, "numpy") else value or 1)


def without_optionals(spec: Any) -> Any:
    """Return an element spec with None where Keras 3 puts an optional that stands for None."""
    import tensorflow as tf

    return tf.nest.map_structure(lambda part: None if isinstance(part, tf.OptionalSpec) else part, spec)


def seed_states(model: Any) -> list[tuple[Any, int]]:
    """Return the variables that seed dropout and the like, each with the index of the number that is the seed."""
    found: dict[int, tuple[Any, int]] = {}
    for layer in layers(model):
        for generator in getattr(layer, "_seed_generators", ()):  # Keras 3
            found[id(generator.state)] = (generator.state, 0)
        generator = getattr(getattr(layer, "_random_generator", None), "_generator", None)  # Keras 2
        if generator is not None:
            found[id(generator.state)] = (generator.state, -1)
    return list(found.values())


def set_seeds_in_code(model: Any, seed: Callable[[int, int | None], int]) -> None:
    """Set the seeds that Keras 2 writes into its graphs as constants; to be called before a step is traced.

    Args:
        model: the model.
        seed: takes the index of the layer and the seed its user gave (or None); returns the seed it gets.
    """
    for index, layer in enumerate(layers(model)):
        generator = getattr(layer, "_random_generator", None)
        if getattr(generator, "_rng_type", "") == "legacy_stateful":
            generator._seed = seed(index, generator._seed)  # type: ignore[union-attr]


def result_hook(model: Any) -> str:
    """Return the name of the method through which `evaluate` gets its result.

    Raises:
        UnsupportedError: this version of Keras has none that hvdx knows.
    """
    for name in ("_get_metrics_result_or_logs", "_validate_and_get_metrics_result"):
        if callable(getattr(model, name, None)):
            return name
    raise UnsupportedError(
        "This version of Keras computes the result of evaluate where hvdx cannot reach it. Update Keras, or average "
        "the result with hvd.allreduce."
    )


def loss_weight(model: Any) -> Any:
    """Return the variable that counts the samples in the mean loss, or None where the model has none."""
    tracker = getattr(model, "_loss_tracker", None) or getattr(
        getattr(model, "compiled_loss", None), "_total_loss_mean", None
    )
    return getattr(tracker, "count", None)


def rate_name(model: Any) -> str:
    """Return what this Keras calls the learning rate in its logs."""
    return "learning_rate" if model_family(model) == "keras 3" else "lr"


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Make the `fit` that is starting begin at this epoch; None takes that back."""
    if model_family(model) == "keras 3":
        model._initial_epoch = epoch
    else:
        model._training_state = None if epoch is None else _InitialEpoch(epoch)


class _InitialEpoch:
    """What tf_keras and Keras 2 ask for the epoch to start at, as they ask BackupAndRestore."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def maybe_load_initial_counters_from_ckpt(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self._epoch, 0
