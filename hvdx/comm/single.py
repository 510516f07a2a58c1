"""The communicator of a world with one rank: everything is already where it should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from hvdx.comm.communicator import Communicator, Label, Topology
from hvdx.comm.dtypes import numpy_dtype
from hvdx.comm.reduce_op import ReduceOp, require_reducible
from hvdx.errors import ConfigurationError


class SingleCommunicator(Communicator):
    """One rank. Arguments are checked as with more ranks, so that a mistake shows before the job is scaled up."""

    name: ClassVar[str] = "single"

    def __init__(self) -> None:
        self.topology = Topology()

    def grouped_allreduce(self, tensors: Sequence[Any], op: ReduceOp, label: Label, threshold: int) -> list[Any]:
        for tensor in tensors:
            require_reducible(numpy_dtype(tensor), op)
        return [tf.identity(tensor) for tensor in tensors]

    def allgather(self, tensor: Any, label: Label) -> Any:
        return tf.identity(tensor)

    def broadcast(self, tensors: Sequence[Any], root: int, label: Label) -> list[Any]:
        self.check_root(root)
        return [tf.identity(tensor) for tensor in tensors]

    def barrier(self, label: Label) -> Any:
        return None if tf.executing_eagerly() else tf.no_op()

    def send(self, tensor: Any, destination: int, tag: int) -> Any:
        raise ConfigurationError(
            "send needs a second rank; this world has one. Start the program with `hvdxrun -np 2`."
        )

    def recv(self, dtype: Any, shape: Any, source: int, tag: int) -> Any:
        raise ConfigurationError(
            "recv needs a second rank; this world has one. Start the program with `hvdxrun -np 2`."
        )

    def allgather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        return [payload]

    def broadcast_bytes(self, payload: bytes | None, root: int, what: str) -> bytes:
        self.check_root(root)
        if payload is None:
            raise ConfigurationError("The root rank of a broadcast gave no payload.")
        return payload

    def close(self, clean: bool) -> bool:
        return True
