"""The contract every communicator keeps, at the level of TensorFlow tensors, eager and in a graph.

A communicator moves buffers between ranks. It knows its rank, the size of the world and who shares its host, and
nothing of gradients, metrics or Keras. All collectives pair by program order: every rank must call the same ones in
the same order, and each call carries a signature that the ranks compare (see `signature.py`).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvdx.comm.reduce_op import ReduceOp
from hvdx.errors import ConfigurationError, UnsupportedError


@dataclass(frozen=True)
class Topology:
    """Who this rank is: in the world, among the ranks of its host, and across hosts at the same local rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1

    @classmethod
    def from_hosts(cls, rank: int, hosts: Sequence[str]) -> Topology:
        """Return the topology of `rank` where `hosts[r]` names the host of rank r."""
        mine = hosts[rank]
        local = [r for r, host in enumerate(hosts) if host == mine]
        local_rank = local.index(rank)
        seen: dict[str, int] = {}
        cross: list[str] = []
        for host in hosts:
            if seen.setdefault(host, 0) == local_rank:
                cross.append(host)
            seen[host] += 1
        return cls(rank, len(hosts), local_rank, len(local), cross.index(mine), len(cross))


@dataclass(frozen=True)
class Label:
    """What a call is about, in the user's words: shown when ranks disagree or one is missing.

    Args:
        what: what the tensors are ("gradients").
        names: one name a tensor; generic names where it is empty.
        warn_if_equal: said once if, at the first exchange, all ranks bring the same bits.
        missing: place and name of tensors that this rank lacks; if another rank has them, that is an error.
    """

    what: str = "tensor(s)"
    names: tuple[str, ...] = ()
    warn_if_equal: str = ""
    missing: tuple[tuple[int, str], ...] = ()

    def name(self, index: int) -> str:
        """Return the name of tensor `index`."""
        return self.names[index] if index < len(self.names) else f"tensor_{index}"


class Communicator(abc.ABC):
    """Moves tensors between ranks. Every method but `send` and `recv` is collective: all ranks must call it.

    Tensor methods take and return TensorFlow tensors and work eagerly and inside `tf.function`, `tf.cond` and
    `tf.while_loop`. Byte methods run at once, outside any graph. All raise MismatchError when ranks disagree,
    StallError when a rank does not come within `timeout` seconds, and UnsupportedError for what the communicator
    cannot do.
    """

    name: ClassVar[str]
    topology: Topology

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The reduction algorithms one can choose from; the same on all ranks."""
        return ()

    def use_algorithm(self, name: str) -> None:
        """Reduce by one of `algorithms` from now on; every rank must choose the same before its next collective."""
        raise UnsupportedError(f"The {self.name} communicator has no algorithms to choose from. Received: {name!r}.")

    @abc.abstractmethod
    def grouped_allreduce(self, tensors: Sequence[Any], op: ReduceOp, label: Label, threshold: int) -> list[Any]:
        """Reduce every tensor over the ranks; tensors travel together in fusion buffers of `threshold` bytes."""

    @abc.abstractmethod
    def allgather(self, tensor: Any, label: Label) -> Any:
        """Concatenate the ranks' tensors (rank >= 1) on dimension 0, which may differ, in the order of ranks."""

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[Any], root: int, label: Label) -> list[Any]:
        """Return the tensors of rank `root` on every rank."""

    @abc.abstractmethod
    def barrier(self, label: Label) -> Any:
        """Return when all ranks have come; in a graph, an operation that does."""

    @abc.abstractmethod
    def send(self, tensor: Any, destination: int, tag: int) -> Any:
        """Send a tensor to one rank."""

    @abc.abstractmethod
    def recv(self, dtype: Any, shape: Any, source: int, tag: int) -> Any:
        """Receive the tensor that `source` sends with `tag`."""

    @abc.abstractmethod
    def allgather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Return every rank's payload, in the order of ranks."""

    @abc.abstractmethod
    def broadcast_bytes(self, payload: bytes | None, root: int, what: str) -> bytes:
        """Return the payload of rank `root`; the others give None."""

    @abc.abstractmethod
    def close(self, clean: bool) -> bool:
        """Take leave of the others.

        Args:
            clean: whether this rank ends as planned. If not, it leaves without waiting for anybody.

        Returns:
            Whether all ranks left together.
        """

    def check_root(self, root: int) -> None:
        """Check a root rank.

        Raises:
            ConfigurationError: it is no rank of this world.
        """
        self._check_rank(root, "root rank")

    def _check_payload(self, payload: bytes | None, root: int) -> None:
        self.check_root(root)
        if (payload is not None) != (root == self.topology.rank):
            raise ConfigurationError("In a broadcast of bytes the root rank gives the payload and the others None.")

    def _check_rank(self, rank: Any, role: str) -> None:
        size = self.topology.size
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < size:
            raise ConfigurationError(
                f"The {role} must be an integer from 0 to {size - 1}, as there are {size} rank(s). Received: {rank!r}."
            )
