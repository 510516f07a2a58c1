"""A request of a worker that a server has not answered yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdx.errors import HvdxError

Send = Callable[[dict[str, Any], Sequence[Any]], None]


@dataclass(eq=False)
class Request:
    """What a worker asked for.

    Args:
        header: what was asked.
        arrays: what came with it.
        send: sends an answer.
        waits_for: in words, what the answer waits for.
    """

    header: dict[str, Any]
    arrays: list[np.ndarray]
    send: Send
    waits_for: str = ""
    answered: bool = field(default=False, init=False)

    @property
    def worker(self) -> int:
        """Who asked."""
        return int(self.header["worker"])

    def answer(self, header: dict[str, Any] | None = None, arrays: Sequence[Any] = ()) -> None:
        """Answer, once."""
        if not self.answered:
            self.answered = True
            self.send({**(header or {}), "id": self.header["id"]}, arrays)

    def fail(self, error: HvdxError) -> None:
        """Answer with an error."""
        self.answer({"error": str(error), "kind": type(error).__name__})
