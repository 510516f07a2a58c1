"""Barrier: nobody goes on before everybody has come."""

from __future__ import annotations

from typing import Any

from hvdx import world
from hvdx.comm.communicator import Label
from hvdx.ops.xla import refuse_inside_xla


def barrier(*, name: str = "") -> Any:
    """Wait until all ranks have called it; collective.

    Args:
        name: what to call it in messages.

    Returns:
        None where TensorFlow is eager, else the operation that waits.

    Raises:
        MismatchError: a rank called another collective.
        StallError: a rank did not come within HVDX_TIMEOUT seconds.
    """
    refuse_inside_xla()
    return world.communicator().barrier(Label(name))
