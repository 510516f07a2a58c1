"""The example of the mirrored strategy, on two logical devices in one process and on two ranks with two each."""

from __future__ import annotations

import pytest

from tests.examples.test_examples import accuracy, fingerprints, needs_scikit_learn, run

pytestmark = [pytest.mark.timeout(300), needs_scikit_learn]


def test_two_devices() -> None:
    output = run(1, "mirrored_digits.py", "--communicator", "hvdx-hierarchical")
    assert accuracy(output) >= 0.96
    fingerprints(output, 1)
    for line in ("replicas in sync: 2", "devices of this rank: CPU:0, CPU:1", "hierarchical between 2 devices"):
        assert line in output
    assert "Warning" not in output


def test_two_devices_on_each_of_two_ranks() -> None:
    output = run(2, "mirrored_digits.py", "--epochs", "12")
    assert accuracy(output) >= 0.95
    fingerprints(output, 2)
    for line in (
        "replicas in sync: 4",
        "ring between 2 devices, shared_memory between ranks",
        "ranks: 2 (this is rank 0)",
    ):
        assert line in output
