"""Trainings in processes of their own, as their errors and deaths end a world."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import os, signal, sys
import numpy as np
import hvdx as hvd
hvd.init()
import importlib
keras = importlib.import_module(sys.argv[1])
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), "mse")
x = np.random.default_rng(hvd.rank()).normal(size=(8, 2)).astype("float32")
y = x[:, :1]
"""

MISMATCH = (
    PRELUDE
    + """
class Extra(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1 and hvd.rank() == 1:
            hvd.broadcast_object("unasked", 1, name="a thing of rank 1")
try:
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(), Extra()])
except hvd.MismatchError as error:
    print("CAUGHT", hvd.rank(), "a thing of rank 1" in str(error), flush=True)
os._exit(0)
"""
)

CHECKPOINT = (
    PRELUDE
    + """
death, number = sys.argv[3], int(sys.argv[4])
replaced, replace = 0, os.replace
def dies(source, target):
    global replaced
    replaced += 1
    if replaced == number:
        if death == "after":
            replace(source, target)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
if death != "never":
    os.replace = dies
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(), hvd.callbacks.MetricAverageCallback(),
             hvd.callbacks.CheckpointCallback(sys.argv[2] if hvd.rank() == 0 else "/nowhere/at/all")]
history = model.fit(x, y, batch_size=4, epochs=5, verbose=0, callbacks=callbacks)
print("EPOCHS", hvd.rank(), history.epoch, "".join(f"{w:.6f} " for w in model.get_weights()[0].ravel()), flush=True)
"""
)


def kerases() -> list[str]:
    from tests.conftest import installed_kerases

    return ["tf_keras" if name == "tf_keras" else "keras" for name in installed_kerases()]


def launch(tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks."""
    (tmp_path / "script.py").write_text(script)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HVDX_")}
    environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3", "HVDX_TIMEOUT": "60"}
    command = [sys.executable, "-m", "hvdx.launch.hvdxrun", "-np", "2", sys.executable, str(tmp_path / "script.py")]
    return subprocess.run([*command, *arguments], env=environ, capture_output=True, text=True, timeout=150)


@pytest.mark.parametrize("module", kerases())
def test_fit_raises_the_error_of_hvdx(tmp_path: Path, module: str) -> None:
    result = launch(tmp_path, MISMATCH, module)
    for rank in (0, 1):
        assert f"CAUGHT {rank} True" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("module", kerases()[-1:])
def test_killed_around_the_rename_it_goes_on_where_the_files_say(tmp_path: Path, module: str) -> None:
    directory = tmp_path / "checkpoints"
    deaths = [
        ("before", 3, [1, 2]),
        ("after", 2, [1, 2, 3, 4]),
    ]  # the second run starts from 2, and dies before it prunes
    for death, number, files in deaths:
        killed = launch(tmp_path, CHECKPOINT, module, str(directory), death, str(number))
        assert killed.returncode != 0
        assert "EPOCHS" not in killed.stdout
        assert sorted(path.name for path in directory.glob("epoch-*")) == [f"epoch-{n:05d}.npz" for n in files]
    again = launch(tmp_path, CHECKPOINT, module, str(directory), "never", "0")
    assert again.returncode == 0, again.stdout + again.stderr
    lines = [text.split("EPOCHS", 1)[1].split(None, 1) for text in again.stdout.splitlines() if "EPOCHS" in text]
    assert {rank for rank, _ in lines} == {"0", "1"}
    assert len({text for _, text in lines}) == 1  # the same epochs and the same weights
    assert lines[0][1].startswith("[4] ")
    assert sorted(os.listdir(directory)) == [f"epoch-{epoch:05d}.npz" for epoch in (3, 4, 5)]
