"""`hvdx.distribute.strategy`: modes, TensorFlow's names for them, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.distribute import MODES, strategy
from tests.training.models import BATCH, dense, linear_data
from tests.training.support import FAMILIES, Family, arrays, raised_everywhere, together, union


@pytest.mark.parametrize(
    ("mode", "cls"),
    [
        ("one_device", tf.distribute.OneDeviceStrategy),
        ("central_storage", tf.distribute.experimental.CentralStorageStrategy),
        ("Multi_Worker_Mirrored", tf.distribute.MultiWorkerMirroredStrategy),
        ("collective_all_reduce", tf.distribute.MultiWorkerMirroredStrategy),
        (" mirrored ", tf.distribute.MirroredStrategy),
    ],
)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_one_process_trains_as_without(world: Any, mode: str, cls: Any, family: Family) -> None:
    made = strategy(mode)
    assert isinstance(made, cls)
    assert made.num_replicas_in_sync == 1
    stock = mode in ("one_device", "central_storage")
    text = made.describe()
    assert ("stock TensorFlow" if stock else f"hvdx {hvd.__version__}") in text
    assert "CPU:0" in text
    x, y = union(linear_data(1))
    weights = []
    for scope in (made.scope(), tf.distribute.get_strategy().scope()):
        family.keras.utils.set_random_seed(1)
        with scope:
            model = dense(family.keras)
            model.compile(family.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        model.fit(x, y, BATCH, epochs=1, verbose=0, shuffle=False)
        weights.append(arrays(model.weights))
    for found, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": "mirorred"}, ["'mirorred'", *MODES, "collective_all_reduce"]),
        ({"mode": None}, ["None"]),
        ({"mode": "multi_worker", "communicator": "gloo"}, ["'gloo'", "hvdx, "]),
        ({"mode": "multi_worker", "communicator": "hvdx-ring"}, ["hvdx-ring", "mirrored"]),
        ({"mode": "multi_worker", "devices": ["CPU:0", "CPU:1"]}, ["one device a rank", "CPU:1"]),
        ({"mode": "multi_worker", "devices": ["CPU:0", "CPU:0"]}, ["twice"]),
        ({"mode": "multi_worker", "devices": [""]}, ["GPU:0"]),
        ({"mode": "multi_worker", "devices": "GPU:5"}, ["GPU:5", "TensorFlow sees CPU:0"]),
        ({"mode": "multi_worker", "devices": "CPU:0", "communicator": "ring"}, ["CPU:0", "set_visible_devices"]),
        ({"mode": "one_device", "devices": "XPU:0"}, ["XPU:0", "TensorFlow sees CPU:0"]),
        ({"mode": "central_storage", "devices": ["CPU:0", "CPU:3"]}, ["CPU:3"]),
        ({"mode": "multi_worker", "bytes_per_pack": -1}, ["-1"]),
        ({"mode": "multi_worker", "staleness": 2}, ["staleness", "multi_worker"]),
        ({"mode": "parameter_server", "stale": 2}, ["stale", "staleness"]),
        ({"mode": "parameter_server"}, ["hvdxrun -np 2 --servers 1"]),
        ({"mode": "one_device", "communicator": "ring"}, ["one_device", "ring"]),
        ({"mode": "one_device", "devices": ["CPU:0", "CPU:1"]}, ["mirrored", "CPU:1"]),
        ({"mode": "central_storage", "bytes_per_pack": 1024}, ["central_storage", "1024"]),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(world: Any, given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(hvd.ConfigurationError) as caught:
        strategy(**given)
    for word in words:
        assert word in str(caught.value)


def test_no_tpu_here(world: Any) -> None:
    with pytest.raises(hvd.UnsupportedError, match="finds no TPU here"):
        strategy("tpu")


@pytest.mark.np(2, plain=False)
@pytest.mark.parametrize("mode", ["one_device", "central_storage"])
def test_one_process_is_refused_where_there_are_ranks(world: Any, mode: str) -> None:
    for message in raised_everywhere(hvd.ConfigurationError, lambda: strategy(mode)):
        assert "2" in message
        assert "multi_worker" in message


@pytest.mark.np(2, plain=False)
def test_a_cluster_that_contradicts_is_refused(world: Any) -> None:
    three = {"worker": ["a:1", "b:1", "c:1"]}
    for message in raised_everywhere(hvd.WorldError, lambda: strategy("multi_worker", cluster=three)):
        assert "3" in message
        assert "2" in message
    together(lambda: strategy("multi_worker", cluster={"worker": ["a:1", "b:1"]}))
