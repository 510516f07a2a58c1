"""What callbacks write and restore under the `multi_worker` strategy: rank 0's files, every rank's state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdx as hvd
from hvdx.distribute import strategy
from tests.training.models import BATCH, linear_data
from tests.training.support import (
    FAMILIES,
    KERAS_3,
    Family,
    arrays,
    assert_equal_everywhere,
    assert_same_bits,
    gathered,
    optimizer_arrays,
    raised_everywhere,
    together,
    union,
)

pytestmark = pytest.mark.np(2)


@pytest.fixture
def folder(world: Any, tmp_path: Path) -> Path:
    """A folder that all ranks share."""
    return Path(hvd.broadcast_object(str(tmp_path), 0))


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _built(family: Family, seed: int) -> Any:
    keras = family.keras
    keras.utils.set_random_seed(seed)
    with strategy("multi_worker").scope():
        model = keras.Sequential([keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
        model.build((None, 5))
        model.compile(family.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


def _fit(model: Any, epochs: int, callbacks: list[Any]) -> Any:
    x, y = union(linear_data(hvd.size()))
    return model.fit(x, y, BATCH * hvd.size(), epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_rank_0_writes_checkpoints_and_logs(world: Any, family: Family, folder: Path) -> None:
    keras = family.keras
    best = keras.callbacks.ModelCheckpoint(str(folder / "best.weights.h5"), save_best_only=True, save_weights_only=True)
    every = keras.callbacks.ModelCheckpoint(str(folder / "model-{epoch}.keras"))
    logs = keras.callbacks.TensorBoard(str(folder / "logs" / f"of-{world.rank()}"))
    model = _built(family, 1)
    best.monitor = "loss"
    together(lambda: _fit(model, 2, [best, every, logs]))
    weights = model.get_weights()  # what is read is a mean over the ranks: by all of them
    hvd.barrier()
    found = _files(folder)
    assert [name for name in found if "logs" not in name] == ["best.weights.h5", "model-1.keras", "model-2.keras"]
    assert {name.split(os.sep)[1] for name in found if "logs" in name} == {"of-0"}
    assert every.filepath == str(folder / "model-{epoch}.keras")
    loaded = keras.models.load_model(folder / "model-2.keras")  # a plain model of one process
    assert_equal_everywhere(arrays(loaded.weights), weights, 0, 0)
    x, _ = union(linear_data(world.size()))
    assert np.isfinite(loaded.predict(x, verbose=0)).all()


class _Stopped(Exception):
    """What ends a fit in the middle."""


def _stopping(keras: Any, epoch: int) -> Any:
    class Stopping(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_begin(self, now: int, logs: Any = None) -> None:
            if now == epoch:
                raise _Stopped

    return Stopping()


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_backup_continues_on_every_rank(world: Any, family: Family, folder: Path) -> None:
    keras = family.keras
    straight = _built(family, 2)
    together(lambda: _fit(straight, 4, []))
    # Under Keras 3 only rank 0 needs to see the files.
    place = folder if family.keras_name != "keras3" or world.rank() == 0 else folder / "unseen"
    backup = lambda: keras.callbacks.BackupAndRestore(str(place / "backup"))  # noqa: E731
    with pytest.raises(_Stopped):
        _fit(_built(family, 2), 4, [backup(), _stopping(keras, 2)])
    hvd.barrier()
    assert _files(folder)
    model = _built(family, 77)
    history = together(lambda: _fit(model, 4, [backup()]))
    assert history.epoch == [2, 3]
    weights, slots = model.get_weights(), optimizer_arrays(model.optimizer)
    assert_same_bits(weights + slots, "weights and optimizer variables")
    assert_equal_everywhere(weights, straight.get_weights(), 1e-6, 1e-7)
    assert_equal_everywhere(slots, optimizer_arrays(straight.optimizer), 1e-6, 1e-7)
    hvd.barrier()
    assert gathered(_files(folder)) == [[]] * world.size()  # done: the backup is gone


@pytest.mark.parametrize("family", KERAS_3, ids=str)
def test_a_backup_that_cannot_be_read_is_an_error_of_all_ranks(world: Any, family: Family, folder: Path) -> None:
    if world.rank() == 0:
        (folder / "latest.weights.h5").write_bytes(b"not a file of weights")
    hvd.barrier()
    model = _built(family, 3)
    fit = lambda: _fit(model, 1, [family.keras.callbacks.BackupAndRestore(str(folder))])  # noqa: E731
    if world.size() == 1:
        with pytest.raises(OSError):
            fit()
        return
    for message in raised_everywhere(hvd.CheckpointError, fit):
        assert str(folder) in message
