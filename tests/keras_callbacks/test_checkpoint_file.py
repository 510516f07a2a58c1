"""Checkpoint files: whole or not there, and damage is noticed, also when the writer is killed at any moment."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hvdx as hvd
from keras_callbacks import checkpoint_file as files

ARRAYS = [
    np.arange(12, dtype="float32").reshape(3, 4),
    np.array(7, "int64"),
    np.zeros((0, 3), "float64"),
    np.array([1.5, -2.0], ml_dtypes.bfloat16),
    np.array([True, False]),
    np.array(1 + 2j, "complex64"),
]


def description(epoch: int = 1) -> dict[str, Any]:
    return {"epoch": epoch, "names": ["x"] * len(ARRAYS), "shapes": [list(a.shape) for a in ARRAYS]}


def write(directory: Path, epoch: int) -> Path:
    path = files.path_of(directory, epoch)
    files.write(path, ARRAYS, description(epoch))
    return path


def test_round_trip(tmp_path: Path) -> None:
    found, arrays = files.read(write(tmp_path, 3))
    assert found["epoch"] == 3
    for got, put in zip(arrays, ARRAYS, strict=True):
        assert got.dtype == put.dtype
        assert got.shape == put.shape
        assert got.tobytes() == put.tobytes()
    assert os.listdir(tmp_path) == ["epoch-00003.npz"]


def test_nothing_in_it_is_code(tmp_path: Path) -> None:
    path = tmp_path / "epoch-00001.npz"
    np.savez(path, description=np.array([{"format": 1}], dtype=object))
    with pytest.raises(hvd.CheckpointError, match=r"epoch-00001\.npz"):
        files.read(path)


@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "head", "text", "directory"])
def test_the_last_whole_file_is_used(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    raw = bytearray(path.read_bytes())
    if damage == "flipped":
        at = raw.index(ARRAYS[0].tobytes()) + 5
        raw[at] ^= 1
    if damage == "head":
        raw[:4] = b"none"
    changed = {"empty": b"", "short": raw[: len(raw) // 2], "text": b"hello"}.get(damage, raw)
    if damage == "directory":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(changed)
    logging.getLogger("hvdx").addHandler(caplog.handler)
    try:
        found = files.newest(tmp_path)
    finally:
        logging.getLogger("hvdx").removeHandler(caplog.handler)
    assert found is not None
    assert found[1]["epoch"] == 1
    assert "epoch-00002.npz" in caplog.text
    assert "going on from epoch-00001.npz" in caplog.text


def test_every_byte_matters(tmp_path: Path) -> None:
    """Any single changed byte is noticed, or changes nothing that is read."""
    path = write(tmp_path, 1)
    whole = path.read_bytes()
    choose = random.Random(1)
    for at in choose.sample(range(len(whole)), 300):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            found, arrays = files.read(path)
        except hvd.CheckpointError:
            continue
        assert found["epoch"] == 1
        assert [a.tobytes() for a in arrays] == [a.tobytes() for a in ARRAYS]


def test_no_whole_file_is_an_error(tmp_path: Path) -> None:
    assert files.newest(tmp_path) is None
    assert files.newest(tmp_path / "absent") is None
    write(tmp_path, 1).write_bytes(b"x")
    with pytest.raises(hvd.CheckpointError, match="Move them away"):
        files.newest(tmp_path)


def test_newest_by_number_and_keep(tmp_path: Path) -> None:
    for epoch in (2, 100000, 9):
        write(tmp_path, epoch)
    (tmp_path / "notes.txt").write_text("mine")
    found = files.newest(tmp_path)
    assert found is not None
    assert found[1]["epoch"] == 100000
    files.prune(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["epoch-00009.npz", "epoch-100000.npz", "notes.txt"]


@pytest.mark.parametrize("step", ["savez", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 1)
    before = path.read_bytes()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np if step == "savez" else os, step, fail)
    with pytest.raises(OSError, match="disk full"):
        files.write(path, ARRAYS, description(5))
    assert os.listdir(tmp_path) == ["epoch-00001.npz"]
    assert path.read_bytes() == before


WRITER = """
import sys
from pathlib import Path
import numpy as np
from keras_callbacks import checkpoint_file as files
directory, epoch = Path(sys.argv[1]), 0
files.prepare(directory)
while True:
    epoch += 1
    arrays = [np.full((400, 1000), epoch, "float32"), np.array(epoch)]
    files.write(files.path_of(directory, epoch), arrays, {"epoch": epoch, "shapes": [[400, 1000], []]})
    files.prune(directory, 2)
    print(epoch, flush=True)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL within and between writes: the newest file is whole, and at least as new as the last one reported."""
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), CUDA_VISIBLE_DEVICES="")
    choose = random.Random(7)
    for attempt in range(4):
        directory = tmp_path / str(attempt)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)], env=environ, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(choose.uniform(0.0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        reported = [int(line) for line in process.stdout.read().split()]
        process.wait()
        found = files.newest(directory)
        assert found is not None
        _, text, arrays = found
        assert text["epoch"] >= max(reported, default=1)
        assert (arrays[0] == text["epoch"]).all()
        files.prepare(directory)
        assert not list(directory.glob(".*"))
        assert 1 <= len(files.listed(directory)) <= 3


def test_an_unusable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        files.prepare(tmp_path / "file" / "below")
