"""What a message and an addition cost: the numbers that the cost models of all algorithms start from.

The model is Hockney's (R. W. Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994), extended by
hosts: a message of n bytes takes `latency + n * per_byte`; a rank sends and receives at the same time; ranks of one
host share its link to the others, and talk to each other over another one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One way from here to there.

    Args:
        latency: seconds until the first byte of a message arrives, software included.
        per_byte: seconds a byte; the inverse of the bandwidth of one direction.
    """

    latency: float
    per_byte: float

    def seconds(self, nbytes: float, flows: int = 1) -> float:
        """Return how long a message takes while `flows` of them share the link."""
        return self.latency + flows * nbytes * self.per_byte


@dataclass(frozen=True)
class Cluster:
    """Hosts with as many ranks each, numbered host by host.

    Args:
        hosts: how many there are.
        ranks_per_host: ranks on each.
        between: each host's link to the others.
        within: what ranks of one host have between them; each pair its own.
        per_byte_added: seconds to reduce one byte with another.
    """

    hosts: int
    ranks_per_host: int
    between: Link
    within: Link
    per_byte_added: float = 0.0

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.hosts * self.ranks_per_host

    @classmethod
    def flat(cls, ranks: int, link: Link, per_byte_added: float = 0.0) -> Cluster:
        """Return one rank a host."""
        return cls(ranks, 1, link, link, per_byte_added)

    def exchange(self, nbytes: float, distance: int, flows: int | None = None) -> float:
        """Return how long a step takes in which ranks exchange `nbytes` with those at this distance.

        Args:
            nbytes: what a rank sends and receives.
            distance: a power of two; the partner of rank r is r XOR distance.
            flows: ranks of a host that take part in a step between hosts; all where it is None. A distance that
                leaves some hosts only (ranks per host that are no power of two) counts as if all ranks left.
        """
        if self.hosts == 1 or self.ranks_per_host % (2 * distance) == 0:
            return self.within.seconds(nbytes)
        return self.between.seconds(nbytes, self.ranks_per_host if flows is None else flows)
