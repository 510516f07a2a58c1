"""What the tests of the mirrored strategy compare: the parts of variables on devices and ranks, and arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

import hvdx as hvd
from hvdx.distribute.devices import devices_here


def check_mirrored(variables: list[Any]) -> None:
    """Check that variables have the same bits on all devices of all ranks."""
    parts = [part.numpy() for variable in variables for part in parts_of(variable)]
    for values in zip(*[iter(parts)] * devices(), strict=True):
        for value in values[1:]:
            np.testing.assert_array_equal(value, values[0], "the devices' values differ")
    bits = hvd.allgather_object([value.tobytes() for value in parts])
    assert all(other == bits[0] for other in bits), "the ranks' values differ"


def parts_of(variable: Any) -> Any:
    """Return a variable's parts, one a device."""
    value = getattr(variable, "value", variable)
    return (variable if callable(value) else value).values


def compare(values: list[np.ndarray], expected: list[np.ndarray], rtol: float, atol: float, what: str) -> None:
    """Check that arrays are equal to others within a tolerance."""
    assert len(values) == len(expected), what
    for index, (value, other) in enumerate(zip(values, expected, strict=True)):
        np.testing.assert_allclose(value.astype("d"), other.astype("d"), rtol, atol, err_msg=f"{what}[{index}]")


def devices() -> int:
    """Return how many devices each rank has."""
    return len(devices_here("CPU"))


def refused(kind: type[Exception], function: Any) -> str:
    """Return the message of the error that the function must raise."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")
