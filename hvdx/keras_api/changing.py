"""Changing what Keras offers no place for: a method of one of its classes, or the class of one object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hvdx.keras_api.families import save_as

_MARK = "hvdx_changes"


def change_method(cls: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Replace a method of a class by what `change` makes of it; a second time the same change does nothing.

    Args:
        cls: the class; nothing happens where it is None.
        name: the method's name.
        change: takes the method as it is, and returns the one to put in its place.
    """
    if cls is None:
        return
    original = getattr(cls, name)
    done: tuple[Any, ...] = getattr(original, _MARK, ())
    if change not in done:
        changed = functools.wraps(original)(change(original))
        setattr(changed, _MARK, (*done, change))
        setattr(cls, name, changed)


def hooked_class(cls: Any, hook: type, **attributes: Any) -> Any:
    """Return a subclass with `hook` in front, under the name that `cls` has in saved files.

    Args:
        cls: the class of an optimizer.
        hook: overrides its methods.
        attributes: of the new class.

    Raises:
        TypeError: the class takes no subclasses.
    """
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    hooked = type(cls)(cls.__name__, (hook, cls), {**names, **attributes})
    save_as(cls, hooked)
    return hooked
