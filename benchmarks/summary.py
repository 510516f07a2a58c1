"""From seconds to statements: medians of rounds, ratios paired by round, spread, and whether a section is too noisy.

A round's time of a way is the median of its calls, each on the slowest rank. Ratios are taken within a round, so what
else the machine does hits both sides alike; what is told of them is their median with the quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FOREIGN_LIMIT = 0.05
"""Share of the machine that processes other than the measured ones may take."""
SPREAD_LIMIT = 0.3
"""Distance of the quartiles, as a share of the median, above which a way is called unsteady."""
LEAST_ROUNDS = 3
"""With fewer, no spread can be told."""


class Quartiles(NamedTuple):
    """First quartile, median and third quartile."""

    low: float
    middle: float
    high: float

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        return (self.high - self.low) / self.middle if self.middle else 0.0


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of one or more values."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass
class Section:
    """What was measured of one workload in one setting.

    Args:
        setting: "2 ranks", "4 ranks", "2 hosts x 2 ranks", "fit, 2 ranks".
        workload: its name.
        ranks, hosts: how many.
        tensors, bytes: what is reduced; for `fit`, `images` is how many one call takes.
        seconds: of each call, on the slowest rank: way, round, call.
        sent: bytes that each host sent on the link in a turn, and the calls of it: way, round.
        busy, own, wall: seconds of all the machine's CPUs, of the measured ranks, and of the clock, over all turns.
        cores: of the machine.
        failed: why a job has no numbers, by its name.
    """

    setting: str
    workload: str
    ranks: int
    hosts: int = 1
    tensors: int = 0
    bytes: int = 0
    images: int = 0
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    sent: dict[str, list[list[float]]] = field(default_factory=dict)
    busy: float = 0.0
    own: float = 0.0
    wall: float = 0.0
    cores: int = 1
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Section:
        """Return the section that was written by `dataclasses.asdict`."""
        return cls(**facts)

    def rounds(self, way: str) -> list[float]:
        """Return the time of a way in each round."""
        return [statistics.median(calls) for calls in self.seconds[way]]

    def time(self, way: str) -> Quartiles:
        """Return the time of a way over the rounds."""
        return quartiles(self.rounds(way))

    def ways(self, peer: str) -> list[str]:
        """Return the ways of a peer: the name itself, or the name with what tells its ways apart in brackets."""
        return [way for way in self.seconds if way == peer or way.startswith(f"{peer} (")]

    def best(self, *peers: str) -> str | None:
        """Return the fastest way of some peers, None where none was measured."""
        measured = [way for peer in peers for way in self.ways(peer)]
        return min(measured, key=lambda way: self.time(way).middle) if measured else None

    def ratio(self, above: str, below: str, minus: str | None = None) -> Quartiles:
        """Return the time of one way as a multiple of another's, paired by round.

        Args:
            above, below: the two ways.
            minus: a way whose time is taken off both first.
        """
        taken = self.rounds(minus) if minus else [0.0] * len(self.seconds[above])
        pairs = zip(self.rounds(above), self.rounds(below), taken, strict=True)
        # A way that costs less than what is taken off has no cost of its own that could be told from noise.
        return quartiles([(a - t) / max(b - t, 1e-9) for a, b, t in pairs])

    def bytes_sent(self, way: str) -> Quartiles:
        """Return the bytes that the host which sends most puts on the link in a call."""
        return quartiles([max(hosts) for hosts in self.sent[way]])

    @property
    def foreign(self) -> float:
        """Share of the machine that others than the measured ranks took."""
        return max(0.0, self.busy - self.own) / (self.wall * self.cores) if self.wall else 0.0

    def unsteady(self, *ways: str) -> list[str]:
        """Return those of some ways (all, if none is named) whose rounds differ too much."""
        return [way for way in ways or self.seconds if self.time(way).spread > SPREAD_LIMIT]

    def noise(self) -> list[str]:
        """Return why the whole section says nothing; empty where it does."""
        reasons = []
        rounds = min((len(rounds) for rounds in self.seconds.values()), default=0)
        if rounds < LEAST_ROUNDS:
            reasons.append(f"{rounds} round(s) are too few to tell a spread")
        if self.foreign > FOREIGN_LIMIT:
            reasons.append(f"others took {100 * self.foreign:.0f} % of the machine while it was measured")
        return reasons


def images_per_second(section: Section) -> dict[str, Quartiles]:
    """Return the images that all ranks together take in a second, by way."""
    rates = {}
    for way in section.seconds:
        ranks = 1 if "one process" in way else section.ranks
        time = section.time(way)
        rates[way] = Quartiles(*(ranks * section.images / seconds for seconds in reversed(time)))
    return rates


def exchange_share(section: Section, way: str) -> Quartiles | None:
    """Return which part of a step the exchange takes, waiting included: what the same ranks without it do not need."""
    alone = f"fit: no exchange, {way.rsplit(', ', 1)[-1]}"
    if alone not in section.seconds or way == alone or "one process" in way:
        return None
    ratio = section.ratio(alone, way)
    return Quartiles(*(1 - part for part in reversed(ratio)))
