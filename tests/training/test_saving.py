"""What a file says of a wrapped optimizer: nothing. It names the plain class and loads where hvdx is not installed."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvdx as hvd
from tests.training.models import BATCH, dense, linear_data
from tests.training.recipes import fit
from tests.training.support import Family, every_family, every_keras, part

PROGRAM = """
import sys
for name in ("hvdx", "keras_callbacks"):
    sys.modules[name] = None
import importlib
keras = importlib.import_module(sys.argv[1])
for path in sys.argv[2:]:
    optimizer = keras.models.load_model(path).optimizer
    print(type(optimizer).__module__, type(optimizer).__qualname__, int(optimizer.iterations), sep="|")
"""


def _serialized(keras: Any, optimizer: Any) -> Any:
    return keras.saving.serialize_keras_object(optimizer)


@every_family
def test_the_configuration_is_that_of_the_plain_optimizer(world: Any, family: Family) -> None:
    schedule = family.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    for make in (lambda: family.optimizers.SGD(schedule), lambda: family.optimizers.Adam(0.1, clipnorm=1.0)):
        optimizer = make()
        before = _serialized(family.keras, optimizer)
        assert _serialized(family.keras, hvd.DistributedOptimizer(optimizer)) == before
        scaled = family.loss_scale(make())
        before = _serialized(family.keras, scaled)
        assert _serialized(family.keras, hvd.DistributedOptimizer(scaled)) == before


@every_keras
def test_a_registered_class_keeps_its_name(world: Any, family: Family) -> None:
    @family.keras.saving.register_keras_serializable("package_of_a_user", "optimizer_of_a_user")
    class Own(family.optimizers.SGD):  # type: ignore[name-defined,misc]
        pass

    optimizer = Own(0.1)
    before = _serialized(family.keras, optimizer)
    assert before["registered_name"] == "package_of_a_user>optimizer_of_a_user"
    after = _serialized(family.keras, hvd.DistributedOptimizer(optimizer))
    assert after == before
    assert type(family.keras.saving.deserialize_keras_object(after)) is Own


@every_family
def test_a_file_loads_without_hvdx(world: Any, family: Family, tmp_path: Path) -> None:
    model = dense(family.keras)
    model.compile(hvd.DistributedOptimizer(family.optimizers.Adam(0.01)), family.keras.losses.MeanSquaredError())
    fit(model, part(linear_data(1), 0), BATCH)
    suffixes = [".keras", ".h5"] if family.keras_name == "keras3" else [".keras", ".h5", ""]
    paths = [str(tmp_path / f"model{suffix}") for suffix in suffixes]
    for path in paths:
        model.save(path)
    command = [sys.executable, "-c", PROGRAM, family.keras.__name__, *paths]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    plain = family.optimizers.Adam
    # Stock Keras does not restore the iterations from directories, nor those of legacy optimizers from .keras.
    restored = [0 if suffix == "" or (family.legacy and suffix == ".keras") else 4 for suffix in suffixes]
    assert done.stdout.split() == [f"{plain.__module__}|{plain.__qualname__}|{count}" for count in restored]


@every_family
def test_checkpoints_of_tensorflow(world: Any, family: Family, tmp_path: Path) -> None:
    """tf.train.Checkpoint goes from a wrapped optimizer to a plain one and back."""
    variable = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(family.optimizers.SGD(0.1, momentum=0.9))
    optimizer.apply_gradients([(tf.constant([1.0, -1.0]), variable)])
    path = tf.train.Checkpoint(optimizer=optimizer, variable=variable).save(str(tmp_path / "checkpoint"))
    other, plain = tf.Variable([0.0, 0.0]), family.optimizers.SGD(0.1, momentum=0.9)
    tf.train.Checkpoint(optimizer=plain, variable=other).restore(path)
    for restored, target in ((optimizer, variable), (plain, other)):
        restored.apply_gradients([(tf.constant([0.0, 0.0]), target)])
    np.testing.assert_array_equal(variable.numpy(), other.numpy())


@every_keras
def test_pickle_of_a_model(world: Any, family: Family) -> None:
    """The unpickled model has a plain optimizer: it belongs to a process that may not know hvdx."""
    model = dense(family.keras)
    model.compile(hvd.DistributedOptimizer(family.optimizers.SGD(0.1)), "mse")
    copied = pickle.loads(pickle.dumps(model))
    assert type(copied.optimizer) is family.optimizers.SGD
    assert all((a == b).all() for a, b in zip(model.get_weights(), copied.get_weights(), strict=True))
