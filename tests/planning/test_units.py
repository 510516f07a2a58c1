"""Numbers with units: what they mean, and that nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvdx.errors import ConfigurationError
from hvdx.planning import units


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.count, "25.6M", 25_600_000),
        (units.count, "138357544", 138_357_544),
        (units.count, "1.5B", 1_500_000_000),
        (units.count, "0.1k", 100),
        (units.seconds, "5us", 5e-6),
        (units.seconds, "120ms", 0.12),
        (units.seconds, "1.5 s", 1.5),
        (units.seconds, "0us", 0.0),
        (units.bandwidth, "25Gbit", 3.125e9),
        (units.bandwidth, "25Gbit/s", 3.125e9),
        (units.bandwidth, "3.125GB/s", 3.125e9),
        (units.bandwidth, "1GiB", 2.0**30),
        (units.size, "64MiB", 1 << 26),
        (units.size, "128MB", 128_000_000),
        (units.share, "0.25", 0.25),
        (units.share, "1", 1.0),
    ],
)
def test_meaning(parse: Callable[[str], Any], text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (units.count, "", "'' is not a number. Write for example 25.6M"),
        (units.count, "-3", "'-3' is not a number"),
        (units.count, "1e6", "has the unit 'e|is not a number"),
        (units.count, "3G", "has the unit 'G'. Units of a number are none, k, M, B, T"),
        (units.count, "0", "must be a whole number, 1 or more"),
        (units.count, "1.0005k", "'1.0005k' is 1000.5"),
        (units.seconds, "120", "has no unit. Units of a time are ns, us, ms, s"),
        (units.seconds, "5 min", "has the unit 'min'"),
        (units.bandwidth, "25Gb", "has the unit 'Gb'.*write for example 25Gbit or 3GB/s"),
        (units.bandwidth, "25gbit", "has the unit 'gbit'"),
        (units.bandwidth, "25", "has no unit"),
        (units.bandwidth, "0Gbit", "must be above 0"),
        (units.size, "0.2B", "must be 1 byte or more"),
        (units.share, "60%", "is not a share. Write for example 0.6"),
        (units.share, "1.2", "must be from 0 to 1"),
        (units.share, "nan", "is not a share"),
    ],
)
def test_refused_by_name(parse: Callable[[str], Any], text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parse(text)
