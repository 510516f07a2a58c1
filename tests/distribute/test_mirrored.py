"""The `mirrored` strategy: two devices in one process, and two ranks with two devices each, against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.distribute import strategy
from hvdx.errors import ConfigurationError
from tests.distribute import mirrored_scenes as scenes
from tests.support.jobs import ROOT, run_ranks
from tests.training.support import FAMILIES

PROGRAM = Path(__file__).with_name("mirrored_program.py")
LIMIT = 580
OWN = [name for name in scenes.SCENES if name not in scenes.SUMS]
OF_EACH = list(scenes.SCENES_OF_EACH_KERAS)
OVER_TENSORFLOW = ["replicas", "reductions", "variables", "loop"]
NAMES = [*OWN, *(f"{name}-{family}" for name in OF_EACH for family in FAMILIES)]
ALL = [*NAMES, *map(scenes.name_of, scenes.cases())]


def _start_alone(folder: Path, devices: int, names: Sequence[str]) -> subprocess.Popen[str]:
    """Start to play scenes in one process."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM), str(folder), str(devices), ",".join(names)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=env, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def _end_alone(process: subprocess.Popen[str], folder: Path) -> dict[str, str]:
    """Return what the scenes of a process came to."""
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    return dict(json.loads((folder / "rank-0.json").read_text()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the scenes came to in one process with two devices; two such processes share them."""
    shares = [[scenes.HALVES[0]], [scenes.HALVES[1], *OWN, *OF_EACH]]
    folders = [tmp_path_factory.mktemp("alone") for _ in shares]
    started = [_start_alone(folder, 2, names) for folder, names in zip(folders, shares, strict=True)]
    outcomes: dict[str, str] = {}
    try:
        for process, folder in zip(started, folders, strict=True):
            outcomes.update(_end_alone(process, folder))
    finally:
        for process in started:
            process.kill()
    return outcomes


def _on_ranks(folder: Path, names: Sequence[str], communicator: str) -> list[dict[str, str]]:
    """Play scenes on two ranks with two devices each, and return what they came to on each."""
    environ = {"TF_CPP_MIN_LOG_LEVEL": "3", "HVDX_TIMEOUT": "60", "OMP_NUM_THREADS": "1", "HVDX_COMM": communicator}
    job = run_ranks(2, [str(PROGRAM), str(folder), "2", ",".join(names)], limit=LIMIT, environ=environ)
    assert job.code == 0, job.output
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What the scenes came to on two ranks with two devices each."""
    return _on_ranks(tmp_path_factory.mktemp("hybrid"), [*scenes.HALVES, *OWN, *OF_EACH], "auto")


@pytest.fixture(scope="module")
def over_tensorflow(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What some scenes came to where TensorFlow's servers connect the ranks, and list all their devices."""
    return _on_ranks(tmp_path_factory.mktemp("tensorflow"), OVER_TENSORFLOW, "tensorflow")


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the sums came to in one process with five devices."""
    folder = tmp_path_factory.mktemp("sums")
    process = _start_alone(folder, 5, scenes.SUMS)
    try:
        return _end_alone(process, folder)
    finally:
        process.kill()


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("name", ALL)
def test_two_devices(alone: dict[str, str], name: str) -> None:
    outcome = alone.get(name, "was not played")
    assert not outcome, outcome


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("name", ALL)
def test_two_devices_on_each_of_two_ranks(hybrid: list[dict[str, str]], name: str) -> None:
    for rank, outcomes in enumerate(hybrid):
        outcome = outcomes.get(name, "was not played")
        assert not outcome, f"rank {rank}:\n{outcome}"


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("name", [*OVER_TENSORFLOW[:-1], *(f"loop-{family}" for family in FAMILIES)])
def test_two_ranks_that_tensorflow_connects(over_tensorflow: list[dict[str, str]], name: str) -> None:
    for rank, outcomes in enumerate(over_tensorflow):
        outcome = outcomes.get(name, "was not played")
        assert not outcome, f"rank {rank}:\n{outcome}"


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("name", scenes.SUMS)
def test_sums_over_devices(sums: dict[str, str], name: str) -> None:
    outcome = sums.get(name, "was not played")
    assert not outcome, outcome


def test_devices_that_are_not_here_are_named(world: object) -> None:
    for devices, culprit in ((["GPU:0"], "GPU:0"), (["CPU:0", "CPU:7"], "CPU:7"), ("/device:TPU:1", "TPU:1")):
        with pytest.raises(ConfigurationError, match=f"names .*{culprit}, which is not here.*TensorFlow sees CPU:0"):
            strategy("mirrored", devices=devices)
    with pytest.raises(ConfigurationError, match="names a device twice"):
        strategy("mirrored", devices=["CPU:0", "/cpu:0"])


def test_one_device_and_what_has_no_meaning(world: object) -> None:
    alone = strategy("mirrored", devices="cpu:0", bytes_per_pack=1 << 20)
    assert alone.num_replicas_in_sync == 1
    assert "none: one replica" in alone.describe()
    with pytest.raises(hvd.HvdxError, match=r"NCCL moves values between GPUs only, and .*CPU:0 is none"):
        strategy("mirrored", communicator="hvdx-nccl")
    with pytest.raises(ConfigurationError, match="communicator= is one of"):
        strategy("mirrored", communicator="hvdx-star")
    with pytest.raises(ConfigurationError, match=r'in the mode "mirrored"\. Received: mode "multi_worker"'):
        strategy("multi_worker", communicator="hvdx-ring")


def test_the_stock_strategy_says_so(world: object) -> None:
    stock = strategy("mirrored", communicator="tensorflow")
    assert type(stock) is tf.distribute.MirroredStrategy
    assert "stock TensorFlow" in stock.describe()
    assert "Keras 3 clips before that" in stock.describe()
    assert "RING" in strategy("mirrored", communicator="ring").describe()
    with pytest.raises(ConfigurationError, match="between GPUs only"):
        strategy("mirrored", communicator="nccl")
    with pytest.raises(ConfigurationError, match="no size of packs"):
        strategy("mirrored", communicator="tensorflow", bytes_per_pack=1024)


LATE = """
import numpy, tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import hvdx.distribute
strategy = hvdx.distribute.strategy("mirrored", communicator="hvdx-hierarchical")
assert "hierarchical between 2 devices" in strategy.describe()
import keras
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0, clipnorm=1.0), loss="mse")
model.fit(numpy.array([[1.0], [-3.0]]), numpy.array([[1.0], [1.0]]), 2, verbose=0)
# The replicas' gradients are -1 and 3, so that after the sum is clipped -1 is left; of clipped ones it would be 0.
print("kernel", model.get_weights()[0].item())
"""


@pytest.mark.skipif(FAMILIES[0].keras_name != "keras3", reason="the Kerases before do not clip first")
def test_keras_imported_after_the_strategy_was_made_is_adapted_too() -> None:
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LATE], env=env, capture_output=True, text=True, timeout=110)
    assert "kernel -1.0" in done.stdout, done.stdout + done.stderr
