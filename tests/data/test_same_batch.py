"""Ranks that read the same batches are told so, end to end; with hvd.shard nothing is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import numpy as np
import keras
import hvdx as hvd

hvd.init()
keras.utils.set_random_seed(1)
x = np.linspace(0, 1, 64, dtype="float32")[:, None]
y = 3 * x
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
if sys.argv[1] == "same":
    model.fit(x, y, batch_size=16, epochs=1, verbose=0, shuffle=False)
else:
    model.fit(hvd.shard((x, y), batch_size=16), epochs=1, verbose=0)
print("trained", flush=True)
"""


@pytest.mark.parametrize("data", ["same", "sharded"])
def test_the_warning_names_the_helper(data: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "hvdx.launch.hvdxrun", "-np", "2", sys.executable, str(script), data]
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("trained") == 2
    said = ended.stdout + ended.stderr
    assert ("read the SAME batch" in said) == (data == "same")
    assert ("64 samples over 2 ranks" in said) == (data == "sharded")
    if data == "same":
        warning = next(line for line in said.splitlines() if "SAME batch" in line)
        assert "hvd.shard(...)" in warning
        assert "warning" in warning
