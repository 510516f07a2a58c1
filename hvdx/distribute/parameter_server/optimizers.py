"""A worker's optimizer told to the servers as plain data, made again there, and whose slot is whose."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.distribute.parameter_server.placement import keys, without_counters
from hvdx.errors import OptimizerError, UnsupportedError
from hvdx.keras_api import Family, base_names, family, inner_optimizer
from hvdx.logs import log
from hvdx.training.under_strategy import alone

_ELEMENTWISE = frozenset(("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion"))
"""Keras's optimizers that treat each number by itself: a piece of a variable is updated as the whole would be."""

_REGISTER = (
    "A class of your own must be defined and registered (keras.saving.register_keras_serializable) before the servers "
    "start: before hvd.init() and strategy()."
)

_TOKEN = re.compile(r"hvdxp(\d+)__")


def check(optimizer: Any) -> Any:
    """Return the optimizer that does the update, which the servers can run.

    Raises:
        OptimizerError: it is none, or one that the parameter server does not know how to run.
    """
    inner = inner_optimizer(optimizer)
    kind = family(inner)
    if kind is Family.LEGACY:
        raise OptimizerError(
            f"The parameter server does not run legacy optimizers. Take keras.optimizers.{type(inner).__name__} "
            f"instead of keras.optimizers.legacy.{type(inner).__name__}."
        )
    if kind not in (Family.KERAS_3, Family.KERAS_2):
        raise OptimizerError(
            f"The parameter server runs optimizers of Keras 3, tf_keras and Keras 2. {type(inner).__name__} is of "
            f"{kind.value}."
        )
    if getattr(inner, "use_ema", False) and inner.ema_overwrite_frequency and steps_per_update(inner) > 1:
        raise UnsupportedError(
            "ema_overwrite_frequency together with gradient_accumulation_steps would overwrite the parameters between "
            "two pushes, of which the servers do not know. Leave one of them out."
        )
    return inner


def steps_per_update(optimizer: Any) -> int:
    """Return over how many batches the optimizer accumulates gradients."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


def cuts(optimizer: Any) -> bool:
    """Return whether the variables may be cut in pieces; a line says so where they may not."""
    cls = type(optimizer)
    stock = cls.__module__.startswith(("keras.src.optimizers.", "tf_keras.src.optimizers."))
    if stock and cls.__name__ in _ELEMENTWISE:
        return True
    log.warning(
        "The optimizer %s is not known to treat each number by itself: no variable is cut in pieces.", cls.__name__
    )
    return False


def describe(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer as plain data, for `rebuild`."""
    keras = _keras_of(optimizer)
    saved = importlib.import_module(keras).optimizers.serialize(optimizer)
    plain = json.loads(json.dumps(saved, default=_plain))
    if "name" in plain["config"]:  # it carries a counter of how many optimizers this worker has made
        plain["config"]["name"] = type(optimizer).__name__.lower()
    rate = "schedule" if _is_schedule(optimizer._learning_rate) else "worker"
    return {"keras": keras, "saved": plain, "rate": rate, "steps": steps_per_update(optimizer)}


def describe_variables(variables: Sequence[Any], optimizer: Any) -> list[dict[str, Any]]:
    """Return the variables as plain data: what they are called, what they are, whether they decay, their constraint.

    Raises:
        UnsupportedError: the servers cannot keep one of them.
    """
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise UnsupportedError(f"{variable.path}: float8 training is not supported with parameter servers.")
    return [
        {
            "key": key,
            "shape": [int(length) for length in variable.shape],
            "dtype": tf.as_dtype(variable.dtype).name,
            # Keras looks at the variable of TensorFlow inside its own.
            "decay": bool(optimizer._use_weight_decay(getattr(variable, "value", variable)
                                                      if hasattr(variable, "path") else variable)),
            "constraint": constraint_of(variable),
        }
        for key, variable in zip(keys([variable_path(v) for v in variables]), variables, strict=True)
    ]  # fmt: skip


def rebuild(description: dict[str, Any]) -> Any:
    """Return an optimizer made of its description.

    Raises:
        OptimizerError: its class is not known in this process.
    """
    keras, saved = importlib.import_module(description["keras"]), json.loads(json.dumps(description["saved"]))
    name = saved.get("registered_name") or saved["class_name"]
    try:
        stock = getattr(keras.optimizers, saved["class_name"], None) if not saved.get("registered_name") else None
        # Keras's own deserialize does not know all of its own optimizers.
        made = stock.from_config(saved["config"]) if stock is not None else keras.optimizers.deserialize(saved)
    except (TypeError, ValueError, ImportError) as error:
        raise OptimizerError(f"A server cannot make the optimizer {name}: {error}. {_REGISTER}") from error
    if isinstance(made, str):
        raise OptimizerError(f"A server does not know the optimizer {name}. {_REGISTER}")
    return made


def for_server(description: dict[str, Any], clips: bool) -> tuple[Any, Any]:
    """Return the optimizer as a server runs it, and its schedule of learning rates or None.

    Workers accumulate and unscale; its learning rate is a number that is set before each update.

    Args:
        description: as `describe` gave it.
        clips: whether it clips by norm itself; else gradients come clipped.
    """
    saved = json.loads(json.dumps(description["saved"]))
    if isinstance(saved["config"].get("learning_rate"), dict):
        saved["config"]["learning_rate"] = 0.0
    optimizer = rebuild({**description, "saved": saved})
    schedule = rebuild(description)._learning_rate if description["rate"] == "schedule" else None
    changed: dict[str, Any] = {"gradient_accumulation_steps": None, "loss_scale_factor": None, "jit_compile": False}
    if not clips:
        changed |= {"clipnorm": None, "global_clipnorm": None}
    for name, value in changed.items():
        if hasattr(optimizer, name):
            setattr(optimizer, name, value)
    return optimizer, schedule


def constraint_of(variable: Any) -> Any:
    """Return a variable's constraint as plain data, or None where it has none.

    Raises:
        UnsupportedError: it cannot be told to the servers.
    """
    constraint = getattr(variable, "constraint", None)
    if constraint is None:
        return None
    keras = next((name.split(".")[0] for name in base_names(constraint) if "keras" in name.split(".")[0]), None)
    if keras is None or not hasattr(constraint, "get_config"):
        raise UnsupportedError(
            f"The constraint of {variable.name} is a plain function, which cannot be sent to the servers. Make it a "
            f"class derived from keras.constraints.Constraint. Received: {constraint!r}."
        )
    saved = importlib.import_module(keras).constraints.serialize(constraint)
    return {"keras": keras, "saved": json.loads(json.dumps(saved, default=_plain))}


def stand_in(number: int, name: str, value: np.ndarray, keras: str, constraint: Any = None) -> Any:
    """Return a variable for an optimizer, named as the real one but for a mark that its slots inherit.

    Args:
        number: which the mark contains.
        name: of the real variable.
        value: what is in it.
        keras: of which Keras it is.
        constraint: as `constraint_of` gave it.
    """
    folder, _, base = name.partition(":")[0].rpartition("/")
    marked = f"hvdxp{number}__{base}"
    path = f"{folder}/{marked}" if folder else marked
    module = importlib.import_module(keras)
    rule = None
    if constraint is not None:
        rule = importlib.import_module(constraint["keras"]).constraints.deserialize(constraint["saved"])
    if module.__version__ < "3":
        return tf.Variable(value, name=path, trainable=True, constraint=rule)
    variable = module.Variable(value, dtype=value.dtype.name, trainable=True, name=marked)
    variable._path = path
    variable.constraint = rule
    return variable


@dataclass(frozen=True)
class Slot:
    """One variable of an optimizer.

    Args:
        owner: number of the variable it belongs to; None where it belongs to the optimizer as a whole.
        label: what it is called, the same for each variable ("momentum").
        variable: itself.
    """

    owner: int | None
    label: str
    variable: Any


def slots(optimizer: Any, owners: Sequence[Any]) -> list[Slot]:
    """Return the variables of an optimizer that was built with stand-ins, in Keras's order."""
    names = {number: _names(owner) for number, owner in enumerate(owners)}
    found: list[Slot] = []
    seen: dict[tuple[int | None, str], int] = {}
    for variable in list(optimizer.variables):
        name = str(variable.name)
        match = _TOKEN.search(name)
        owner = int(match[1]) if match else None
        label = name
        for known in names.get(owner, ()) if owner is not None else ():
            label = label.replace(known, "")
        label = without_counters(re.sub(r":\d+$", "", label)).strip("_/")
        label = label.rpartition("/")[2] or "slot"  # without the name scope in which it happened to be made
        count = seen[owner, label] = seen.get((owner, label), 0) + 1
        found.append(Slot(owner, label if count == 1 else f"{label}#{count}", variable))
    return found


def slots_of_whole(optimizer: Any, variables: Sequence[Any]) -> list[Slot]:
    """Return the variables of a worker's own optimizer in Keras's order, by building its like on stand-ins.

    Raises:
        UnsupportedError: its like has other variables.
    """
    inner = inner_optimizer(optimizer)
    with alone():  # one worker asks for the slots, in the midst of a strategy's scope
        like, owners = _like(describe(inner), variables)
    own, template = list(inner.variables), slots(like, owners)
    if len(own) != len(template):
        raise UnsupportedError(
            f"The state of {type(inner).__name__} cannot be matched with the servers': it has {len(own)} variables, "
            f"and one made anew for the same variables has {len(template)}."
        )
    return [Slot(slot.owner, slot.label, variable) for slot, variable in zip(template, own, strict=True)]


def _like(description: dict[str, Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return an optimizer made of its description, and the stand-ins for variables on which it is built."""
    like = rebuild(description)
    owners = [
        stand_in(number, variable_path(v), np.zeros([1] * len(v.shape), np.dtype(tf.as_dtype(v.dtype).as_numpy_dtype)),
                 description["keras"])
        for number, v in enumerate(variables)
    ]  # fmt: skip
    like.build(owners)
    return like, owners


def variable_path(variable: Any) -> str:
    """Return the name a user knows a variable by."""
    return str(getattr(variable, "path", None) or variable.name)


def _names(owner: Any) -> list[str]:
    """Return how a stand-in is called inside the names of slots, the longest first."""
    path = variable_path(owner).partition(":")[0]
    base = path.rpartition("/")[2]
    return sorted({path, path.replace("/", "_"), base}, key=len, reverse=True)


def _keras_of(optimizer: Any) -> str:
    return next(
        name.split(".")[0] for name in base_names(optimizer) if name.startswith(("keras.src.", "tf_keras.src."))
    )


def _is_schedule(rate: Any) -> bool:
    return any(name.rsplit(".", 1)[-1] == "LearningRateSchedule" for name in base_names(rate))


def _plain(value: Any) -> Any:
    """Return numbers of numpy and TensorFlow as JSON knows them."""
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array.tolist()
