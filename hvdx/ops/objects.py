"""Python objects between ranks: they travel pickled, so only between processes of one job."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdx import world
from hvdx.errors import ConfigurationError


def broadcast_object(value: Any = None, root_rank: int = 0, *, name: str = "an object") -> Any:
    """Return rank `root_rank`'s object on every rank; collective, outside graphs.

    Args:
        value: any object that can be pickled; what the other ranks pass is ignored.
        root_rank: whose object it is.
        name: what to call it in messages.

    Raises:
        ConfigurationError: `root_rank` is no rank of this world, or the object cannot be pickled; on every rank.
        MismatchError, StallError: as `allreduce`.
    """
    communicator = world.communicator()
    communicator.check_root(root_rank)
    payload = _pickled(value) if communicator.topology.rank == root_rank else None
    return _unpickled([communicator.broadcast_bytes(payload, root_rank, name)], [root_rank])[0]


def allgather_object(value: Any, *, name: str = "objects") -> list[Any]:
    """Return all ranks' objects, in the order of ranks; collective, outside graphs.

    Args:
        value: any object that can be pickled.
        name: what to call it in messages.

    Raises:
        MismatchError, StallError: as `allreduce`.
    """
    payloads = world.communicator().allgather_bytes(_pickled(value), name)
    return _unpickled(payloads, range(len(payloads)))


@dataclass(frozen=True)
class _NotPickled:
    """Travels in place of an object that cannot be pickled, so that the other ranks do not wait for it."""

    reason: str


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # pickle raises whatever the object's own methods raise
        return pickle.dumps(_NotPickled(f"{type(value).__name__}: {error}"))


def _unpickled(payloads: Sequence[bytes], ranks: Sequence[int]) -> list[Any]:
    values = [pickle.loads(payload) for payload in payloads]
    failed = [(rank, v.reason) for rank, v in zip(ranks, values, strict=True) if isinstance(v, _NotPickled)]
    if failed:
        rank, reason = failed[0]
        raise ConfigurationError(f"The object of rank {rank} cannot be pickled, so it cannot travel: {reason}.")
    return values
