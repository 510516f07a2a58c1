"""Reading numbers with units, strictly: what is not understood is refused by name, with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from hvdx.errors import ConfigurationError

Units = Mapping[str, int | Decimal]

_COUNTS: Units = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SECONDS: Units = {"ns": Decimal("1e-9"), "us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": 1}
_BYTES: Units = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
}  # fmt: skip
_BITS: Units = {"kbit": 125, "Mbit": 125 * 10**3, "Gbit": 125 * 10**6, "Tbit": 125 * 10**9}


def count(text: str) -> int:
    """Return a whole number above 0: `25.6M` is 25,600,000.

    Raises:
        ConfigurationError: the text is no such number.
    """
    value = _read(text, _COUNTS, "a number", "25.6M")
    if value < 1 or value != int(value):
        raise ConfigurationError(f"{text!r} is {value:f}, and must be a whole number, 1 or more.")
    return int(value)


def seconds(text: str) -> float:
    """Return seconds, 0 or more: `5us` is 0.000005.

    Raises:
        ConfigurationError: the text is no time.
    """
    return float(_read(text, _SECONDS, "a time", "5us or 120ms"))


def size(text: str) -> int:
    """Return bytes, 1 or more: `64MiB` is 67,108,864.

    Raises:
        ConfigurationError: the text is no size.
    """
    value = _read(text, _BYTES, "a size", "64MiB")
    if value < 1:
        raise ConfigurationError(f"{text!r} must be 1 byte or more.")
    return int(value)


def bandwidth(text: str) -> float:
    """Return bytes a second, above 0: `25Gbit`, `25Gbit/s` and `3.125GB/s` are 3,125,000,000.

    Raises:
        ConfigurationError: the text is no bandwidth.
    """
    value = _read(text.strip().removesuffix("/s"), {**_BITS, **_BYTES}, "a bandwidth", "25Gbit or 3GB/s")
    if value <= 0:
        raise ConfigurationError(f"{text!r} must be above 0.")
    return float(value)


def share(text: str) -> float:
    """Return a number from 0 to 1.

    Raises:
        ConfigurationError: the text is none.
    """
    value = _read(text, {"": 1}, "a share", "0.6")
    if value > 1:
        raise ConfigurationError(f"{text!r} must be from 0 to 1: it is a share.")
    return float(value)


def _read(text: str, units: Units, what: str, example: str) -> Decimal:
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-zµ/]*)\s*", text)
    if found is None:
        raise ConfigurationError(f"{text!r} is not {what}. Write for example {example}.")
    number, unit = found.groups()
    if unit not in units:
        known = ", ".join(name or "none" for name in units)
        told = f"has the unit {unit!r}" if unit else "has no unit"
        raise ConfigurationError(f"{text!r} {told}. Units of {what} are {known}; write for example {example}.")
    return Decimal(number) * units[unit]
