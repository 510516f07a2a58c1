"""Python objects between ranks: they travel pickled, so only between processes of one job."""

from __future__ import annotations

import pickle
from typing import Any

from hvdx import world


def broadcast_object(value: Any = None, root_rank: int = 0, *, name: str = "an object") -> Any:
    """Return rank `root_rank`'s object on every rank; collective, outside graphs.

    Args:
        value: any object that can be pickled; what the other ranks pass is ignored.
        root_rank: whose object it is.
        name: what to call it in messages.

    Raises:
        ConfigurationError: `root_rank` is no rank of this world.
        MismatchError, StallError: as `allreduce`.
    """
    communicator = world.communicator()
    communicator.check_root(root_rank)
    payload = pickle.dumps(value) if communicator.topology.rank == root_rank else None
    return pickle.loads(communicator.broadcast_bytes(payload, root_rank, name))


def allgather_object(value: Any, *, name: str = "objects") -> list[Any]:
    """Return all ranks' objects, in the order of ranks; collective, outside graphs.

    Args:
        value: any object that can be pickled.
        name: what to call it in messages.

    Raises:
        MismatchError, StallError: as `allreduce`.
    """
    return [pickle.loads(payload) for payload in world.communicator().allgather_bytes(pickle.dumps(value), name)]
