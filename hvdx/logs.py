"""hvdx's logger: one line a message, with the rank in front, on stderr; HVDX_LOG sets the level."""

from __future__ import annotations

import logging
import sys

from hvdx import environment

log = logging.getLogger("hvdx")
_LEVELS = {
    "trace": logging.DEBUG, "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING,
    "error": logging.ERROR, "fatal": logging.CRITICAL,
}  # fmt: skip


class _RankPrefix(logging.Formatter):
    def __init__(self, rank: int, role: str) -> None:
        super().__init__()
        self._who = f"{role} {rank}"

    def format(self, record: logging.LogRecord) -> str:
        return f"hvdx {self._who} {record.levelname.lower()}: {record.getMessage()}"


def configure(rank: int, role: str = "rank") -> None:
    """Give the logger its handler and level; called by `hvd.init()`.

    Args:
        rank: this process's number.
        role: what it is the number of.

    Raises:
        ConfigurationError: HVDX_LOG is no level.
    """
    level = _LEVELS[environment.LOG.read()]
    for handler in list(log.handlers):
        if getattr(handler, "hvdx", False):
            log.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.hvdx = True  # type: ignore[attr-defined]
    handler.setFormatter(_RankPrefix(rank, role))
    log.addHandler(handler)
    log.setLevel(level)
    log.propagate = False
