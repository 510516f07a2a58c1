"""Work that one rank of each host does while the others of the job wait, such as a download into a shared cache."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from hvdx import world
from hvdx.errors import CollectiveError, ConfigurationError, WorldError
from hvdx.ops.objects import allgather_object

T = TypeVar("T")


def once_per_host(function: Callable[[], T], *, name: str = "") -> T:
    """Run `function` on the first rank of each host and return its result on every rank of that host; collective.

    The others wait, for HVDX_TIMEOUT seconds at most, so of several ranks only one fetches a file into an empty cache:
    `path = hvd.once_per_host(lambda: keras.utils.get_file("data.zip", url))`.

    Args:
        function: called without arguments; what it returns must be picklable (a path, not a model). It calls no
            collective, as not every rank runs it.
        name: what to call it in messages; by default the function's name.

    Raises:
        CollectiveError: it failed on the first rank of a host; raised on every rank, with the error's text. That first
            rank itself raises the error as it was.
        ConfigurationError: `function` cannot be called, or its result cannot be pickled.
        WorldError: the communicator and the system disagree about who shares a host.
        StallError: a first rank needed more than HVDX_TIMEOUT seconds.
    """
    if not callable(function):
        raise ConfigurationError(
            f"hvd.once_per_host takes a function without arguments, not its result: hvd.once_per_host(lambda: ...). "
            f"Received: {function!r}."
        )
    name = name or getattr(function, "__name__", type(function).__name__)
    topology = world.communicator().topology
    if topology.size == 1:
        return function()
    payload, error = _run(function, name) if topology.local_rank == 0 else (None, None)
    everyone = allgather_object((socket.gethostname(), payload), name=f"hvd.once_per_host({name})")
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(everyone):
        if other is not None and other[0] is not None:
            raise CollectiveError(f"hvd.once_per_host({name}) failed on rank {rank}: {other[0]}")
    return pickle.loads(_of_my_host(everyone, topology.rank))


def _run(function: Callable[[], Any], name: str) -> tuple[tuple[str | None, bytes], BaseException | None]:
    """Return what to tell the others (an error's text or a pickled result), and the error itself."""
    try:
        result = function()
    except Exception as error:
        return (f"{type(error).__name__}: {error}", b""), error
    try:
        return (None, pickle.dumps(result)), None
    except Exception as error:
        refusal = ConfigurationError(
            f"hvd.once_per_host({name}) returned a {type(result).__name__}, which cannot be sent to the other ranks "
            f"({error}). Return something picklable, such as a path, or nothing."
        )
        return (str(refusal), b""), refusal


def _of_my_host(everyone: list[Any], rank: int) -> bytes:
    host = everyone[rank][0]
    for name, payload in everyone[: rank + 1]:
        if name == host and payload is not None:
            return bytes(payload[1])
    raise WorldError(
        f"rank {rank} has no first rank on its host {host!r}: the communicator and the system disagree about which "
        f"ranks share a host. The hosts of the ranks are: {', '.join(name for name, _ in everyone)}."
    )
