"""What workers tell the servers before the first step, and the comparison of what they told. Pure."""

from __future__ import annotations

from typing import Any

from hvdx.distribute.parameter_server.placement import Entry, Placement, place
from hvdx.errors import HvdxError, MismatchError


def placement_of(spec: dict[str, Any]) -> Placement:
    """Return where the pieces of registered variables are; the same on every worker and server."""
    entries = [Entry(info["key"], tuple(info["shape"]), info["dtype"]) for info in spec["variables"]]
    # A constraint (a norm of a column) needs the whole variable.
    whole = [
        number for number, info in enumerate(spec["variables"]) if info["constraint"] is not None or not spec["cuts"]
    ]
    return place(entries, spec["options"]["servers"], spec["options"]["piece_bytes"], whole)


def contradiction(known: dict[str, Any], worker: int, spec: dict[str, Any], other: int) -> HvdxError | None:
    """Return the error that says where two workers' registrations differ, or None.

    Args:
        known: what one worker registered.
        worker: its number.
        spec: what the other registered.
        other: its number.
    """
    for name in sorted(known["options"].keys() | spec["options"].keys()):
        one, two = known["options"].get(name), spec["options"].get(name)
        if one != two:
            return _error(worker, f"says {name}={one!r}", other, f"{name}={two!r}")
    for number in range(max(len(known["variables"]), len(spec["variables"]))):
        one, two = (_words(side["variables"], number) for side in (known, spec))
        if one != two:
            return _error(worker, f"registers {one}", other, f"{two}, as variable {number}")
    if known["optimizer"] != spec["optimizer"]:
        one, two = _first_difference(known["optimizer"], spec["optimizer"])
        return _error(worker, f"has the optimizer setting {one}", other, two)
    return None


def _error(worker: int, one: str, other: int, two: str) -> MismatchError:
    return MismatchError(
        f"The workers contradict each other: worker {worker} {one}, and worker {other} {two}. Build the same model and "
        "optimizer on every worker."
    )


def _words(variables: list[dict[str, Any]], number: int) -> str:
    if number >= len(variables):
        return "no further variable"
    info = variables[number]
    entry = Entry(info["key"], tuple(info["shape"]), info["dtype"])
    decay = "" if info["decay"] else " without weight decay"
    constraint = f" with {info['constraint']['saved']}" if info["constraint"] is not None else ""
    return f"{entry.key} {entry.describe()}{decay}{constraint}"


def _first_difference(one: Any, two: Any, path: str = "") -> tuple[str, str]:
    if isinstance(one, dict) and isinstance(two, dict):
        for name in sorted(one.keys() | two.keys()):
            if one.get(name) != two.get(name):
                return _first_difference(one.get(name), two.get(name), name)
    return f"{path}={one!r}", f"{path}={two!r}"
