"""What the servers hold, put together: to one file, into a Keras optimizer, and out to other servers again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.distribute.parameter_server import optimizers
from hvdx.distribute.parameter_server.placement import Placement
from hvdx.errors import CheckpointError
from keras_callbacks import checkpoint_file

_KIND = "parameters and optimizer state of parameter servers"

Part = tuple[list[dict[str, Any]], list[np.ndarray]]


@dataclass
class State:
    """Parameters and an optimizer's state, whole.

    Args:
        parameters: one for each variable.
        slots: of each variable by number, what the optimizer keeps for it, by name.
        whole: what the optimizer keeps once ("iteration"), by name.
    """

    parameters: list[np.ndarray]
    slots: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    whole: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """How many updates the optimizer has made."""
        return int(self.whole["iteration"])

    def fill(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Give a worker's optimizer the servers' slots, so that it is saved as one that has trained by itself.

        Its learning rate, its number of iterations and what it has accumulated are left alone.
        """
        for slot in optimizers.slots_of_whole(optimizer, variables):
            value = self.whole.get(slot.label) if slot.owner is None else self.slots.get((slot.owner, slot.label))
            if value is not None and slot.label != "iteration":
                slot.variable.assign(value)


def of_optimizer(optimizer: Any, variables: Sequence[Any], updates: int) -> State:
    """Return the state of a worker's optimizer and of its variables.

    Args:
        optimizer: the optimizer.
        variables: what it updates.
        updates: how many updates it has made.
    """
    inner = optimizers.check(optimizer)
    result = State([np.asarray(variable.numpy()) for variable in variables])
    for slot in optimizers.slots_of_whole(inner, variables):
        value = np.asarray(slot.variable.numpy())
        if slot.owner is None:
            result.whole[slot.label] = value
        else:
            result.slots[slot.owner, slot.label] = value
    result.whole["iteration"] = np.asarray(updates, np.int64)
    return result


def joined(placement: Placement, parts: Sequence[Part]) -> State:
    """Return the state that servers hold in parts."""
    found: dict[tuple[int, str | None], list[tuple[int, np.ndarray]]] = {}
    whole: dict[str, np.ndarray] = {}
    for server, (about, arrays) in enumerate(parts):
        pieces = placement.of_server(server)
        for info, array in zip(about, arrays, strict=True):
            if info["piece"] is None:
                whole.setdefault(info["label"], np.array(array))
                continue
            piece = pieces[info["piece"]]
            found.setdefault((piece.entry, info["label"]), []).append((piece.start, array))
    values = {key: _whole(sorted(rows, key=lambda row: row[0])) for key, rows in found.items()}
    parameters = [values[number, None] for number in range(len(placement.entries))]
    slots = {(number, label): value for (number, label), value in values.items() if label is not None}
    return State(parameters, slots, whole)


def split(placement: Placement, state: State) -> list[Part]:
    """Return what each server gets of a state."""
    parts: list[Part] = []
    for server in range(placement.servers):
        about: list[dict[str, Any]] = [{"piece": None, "label": label} for label in state.whole]
        arrays = list(state.whole.values())
        for number, piece in enumerate(placement.of_server(server)):
            about.append({"piece": number, "label": None})
            arrays.append(piece.of(state.parameters[piece.entry]))
            for (entry, label), value in state.slots.items():
                if entry == piece.entry:
                    about.append({"piece": number, "label": label})
                    arrays.append(piece.of(value))
        parts.append((about, arrays))
    return parts


def write(path: str | PathLike[str], state: State, spec: dict[str, Any]) -> None:
    """Write a state to one file, which appears whole or not at all; numpy can read it.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    arrays = [*state.parameters, *state.slots.values(), *state.whole.values()]
    description = {
        "kind": _KIND,
        "keys": [info["key"] for info in spec["variables"]],
        "optimizer": spec["optimizer"],
        "slots": [list(key) for key in state.slots],
        "whole": list(state.whole),
        "shapes": [list(array.shape) for array in arrays],
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    checkpoint_file.write(Path(path), arrays, description)


def read(path: str | PathLike[str], spec: dict[str, Any]) -> State:
    """Return the state of a file.

    Raises:
        CheckpointError: it cannot be read, or is of other variables; names one.
    """
    description, arrays = checkpoint_file.read(Path(path))
    if description.get("kind") != _KIND:
        raise CheckpointError(f"{path} holds no state of parameter servers.")
    saved, own = description["keys"], [info["key"] for info in spec["variables"]]
    if saved != own:
        one, two = next(
            ((a, b) for a, b in zip([*saved, None], [*own, None], strict=False) if a != b), (saved[-1:], own[-1:])
        )
        raise CheckpointError(f"{path} was saved with other variables: there {one!r}, here {two!r}.")
    count, slots = len(saved), description["slots"]
    keys = [(int(entry), str(label)) for entry, label in slots]
    return State(
        arrays[:count],
        dict(zip(keys, arrays[count : count + len(slots)], strict=True)),
        dict(zip(description["whole"], arrays[count + len(slots) :], strict=True)),
    )


def _whole(rows: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    arrays = [array for _, array in rows]
    return np.concatenate(arrays) if len(arrays) > 1 else np.array(arrays[0])
