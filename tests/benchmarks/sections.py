"""Sections with made-up times, for the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.summary import Section


def section(times: Mapping[str, Sequence[float]], setting: str = "2 ranks", workload: str = "ResNet-50") -> Section:
    """Return a quiet section in which each way took so many seconds in each round, one call a round."""
    seconds = {way: [[taken] for taken in rounds] for way, rounds in times.items()}
    hosts = 2 if "hosts" in setting else 1
    return Section(setting, workload, 2 * hosts, hosts, 3, 1000, seconds=seconds, busy=1, own=1, wall=1, cores=2)
