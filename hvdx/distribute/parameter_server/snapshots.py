"""The newest parameters in asynchronous mode, which come while the worker computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdx.distribute.parameter_server.link import Link, Pending
from hvdx.distribute.parameter_server.protocol import Message


class Snapshots:
    """Asks for the next parameters when the last have come; the link's thread receives them."""

    def __init__(self) -> None:
        self._coming: list[Pending] = []
        self._began = False

    def take(self, link: Link, ask: Callable[[], list[Pending]], least: Sequence[int] | None) -> list[Message] | None:
        """Return the newest parameters, or None where no newer ones have come.

        Args:
            link: the connections.
            ask: sends requests for parameters.
            least: for each server, which push of every worker they must contain; None takes what has come.
        """
        replies = None
        if self._coming and all(pending.done.is_set() for pending in self._coming):
            replies, self._coming = link.wait(self._coming), []
        if not self._began or (least is not None and not _contain(replies, least)):
            link.wait(self._coming)  # which are older than the ones asked for now
            replies, self._coming = link.wait(ask()), []
        self._began = True
        if not self._coming:
            self._coming = ask()
        return replies


def _contain(replies: Sequence[Message] | None, least: Sequence[int]) -> bool:
    """Return whether the parameters of each server contain every worker's pushes up to `least`."""
    if replies is None:
        return False
    return all(reply.header["slowest"] >= clock for reply, clock in zip(replies, least, strict=True))
