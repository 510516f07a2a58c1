"""An optimizer's state: its slots, its learning rate, its momentum buffers, wherever its Keras keeps them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdx.keras_api.families import Family, base_names, family, inner_optimizer, is_loss_scale_optimizer, is_optimizer


def optimizers(model: Any) -> list[Any]:
    """Return the model's optimizer and others that it keeps as attributes, each once."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    unique = {id(value): value for value in found if value is not None and is_optimizer(value)}
    inner = {id(value.inner_optimizer) for value in unique.values() if is_loss_scale_optimizer(value)}
    return [value for key, value in unique.items() if key not in inner]


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
        if kind is Family.KERAS_3:
            optimizer.build(list(variables))
        else:
            with tf.name_scope(inner.name or "optimizer"):  # as in the first step, or the slots have other names
                inner.build(list(variables))


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
