"""The list a callback stands in: found, and put in order, since no Keras tells a callback about its neighbours."""

from __future__ import annotations

import sys
from typing import Any

from keras_callbacks.base import ANYWHERE, Callback

_DEPTH = 12


def find(callback: Callback) -> Any:
    """Return the CallbackList that is calling `callback` now, or None where something else calls it.

    Every Keras calls its callbacks from a method of the list, which thus stands a few frames above.
    """
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        owner = frame.f_locals.get("self")
        listed = getattr(owner, "callbacks", None) if owner is not callback else None
        if isinstance(listed, list) and any(other is callback for other in listed):
            return owner
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def arrange(container: Any, *extra: Callback) -> None:
    """Put hvdx's callbacks where they belong (the first first, the last last) and the others between, in their order.

    Args:
        container: a CallbackList.
        extra: callbacks to take in as well.
    """
    # A new list: the old one is being iterated over by whoever calls.
    present = list(container.callbacks)
    present += [callback for callback in extra if not any(other is callback for other in present)]
    container.callbacks = sorted(present, key=_position)


def neighbours(container: Any) -> list[Any]:
    """Return the callbacks of a list, or none where there is no list."""
    return list(getattr(container, "callbacks", []))


def _position(callback: Any) -> int:
    return callback.position if isinstance(callback, Callback) else ANYWHERE
