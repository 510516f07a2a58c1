"""What the parts of hvdx ask of a model, and of the `fit` that trains it, in the words of its Keras."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from hvdx.errors import OptimizerError, UnsupportedError
from hvdx.keras_api.families import BASES, MODEL_BASES, base_names, inner_optimizer, is_optimizer, model_family


def model_classes() -> list[Any]:
    """Return the class that defines `compile` in each Keras that has been imported."""
    found = [getattr(sys.modules.get(name.rpartition(".")[0]), name.rpartition(".")[2], None) for name in MODEL_BASES]
    return [cls for cls in found if "compile" in vars(cls or object)]


def check_optimizer_of_model(model: Any, optimizer: Any) -> None:
    """Check that model and optimizer are of the same Keras; what is no optimizer is let through.

    Raises:
        OptimizerError: they are not; names both.
    """
    if model_family(model) is None or not is_optimizer(optimizer):
        return
    root = type(model).__mro__[[name in MODEL_BASES for name in base_names(model)].index(True)].__module__
    names = [name for name in base_names(inner_optimizer(optimizer)) if name in BASES]
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


def is_built_for_fit(model: Any) -> bool:
    """Return whether a compiled model of Keras 3 has all variables that training and evaluating it need."""
    parts = [getattr(model, name, None) for name in ("_compile_metrics", "_compile_loss", "optimizer")]
    return is_built(model) and all(part is None or part.built for part in parts)


def overrides_train_step(model: Any) -> bool:
    """Return whether the model's training step is the user's own."""
    owner = getattr(model.train_step, "__module__", "")
    return not _is_keras(owner)


def is_saving() -> bool:
    """Return whether tf_keras or Keras 2 now traces a layer for a SavedModel, which must hold all that it needs."""
    for name in ("tf_keras", "keras"):
        module = sys.modules.get(f"{name}.src.engine.base_layer_utils")
        if module is not None and module.call_context().saving:
            return True
    return False


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
