"""TensorFlow's own strategy between ranks, configured by hvdx: what it trains, and what it says to Keras 3."""

from __future__ import annotations

import json
import os

import pytest

from tests.conftest import installed_kerases
from tests.support.jobs import run_ranks


@pytest.mark.parametrize("communicator", ["tensorflow", "ring"])
def test_equals_one_process_without_tf_config_by_hand(communicator: str) -> None:
    assert "TF_CONFIG" not in os.environ
    job = run_ranks(2, ["-m", "tests.distribute.multi_worker_program", communicator])
    assert job.code == 0, job.output
    lines = [line.removeprefix("[0] ") for line in job.output.splitlines() if line.startswith("[0] ")]
    [found] = [json.loads(line.removeprefix("FOUND ")) for line in lines if line.startswith("FOUND ")]
    assert sorted(found) == sorted(installed_kerases())
    refused = found.pop("keras3", None)
    assert refused is None or "Use tf_keras, or leave out communicator=" in refused
    assert all(difference < 1e-5 for difference in found.values()), found
    named = "AUTO" if communicator == "tensorflow" else "RING"
    assert f"  gradients move by: TensorFlow's {named}" in lines
    assert "  strategy made by: stock TensorFlow" in lines
