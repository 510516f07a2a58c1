"""`push_pull`: BytePS's name for an all-reduce."""

from __future__ import annotations

from typing import Any

from hvdx.ops.allreduce import Average, Sum, allreduce


def push_pull(tensor: Any, average: bool = True, name: str | None = None) -> Any:
    """Return the tensor averaged or summed over all workers; collective.

    In a job with parameter servers it goes through them, like everything that the workers exchange there; elsewhere it
    is `allreduce` over the ranks.

    Args:
        tensor: as for `allreduce`.
        average: whether the sum is divided by the number of workers.
        name: what to call the tensor in messages.

    Raises:
        MismatchError, StallError, UnsupportedError: as `allreduce`.
    """
    return allreduce(tensor, Average if average else Sum, name=name)
