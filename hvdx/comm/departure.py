"""Ending a process whose library would wait, in its own exit code, for ranks that do not come any more."""

from __future__ import annotations

import atexit
import os
import sys

_installed = False
_forbidden = False


def install() -> None:
    """Take over the end of the process, if need be; call it after the library has registered its own exit code.

    Exit handlers run last in, first out.
    """
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_leave)


def forbid() -> None:
    """Do not run the library's exit code: a collective has failed, or the others have not said goodbye."""
    global _forbidden
    _forbidden = True


def _leave() -> None:
    if not _forbidden:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130 if getattr(sys, "last_type", None) is KeyboardInterrupt else 1)
