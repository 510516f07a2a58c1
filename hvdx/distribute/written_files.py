"""Keras 3's callbacks that write files, under a strategy with several ranks: rank 0 writes, every rank restores.

tf_keras and Keras 2 ask the strategy who writes. Keras 3 writes on every rank to the same place, and restores on every
rank what it finds there. As tf_keras does it, the others write to a place of their own that is removed: what is saved
may hold variables that are reduced over all ranks as they are read, so that all must save.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdx import keras_api, world
from hvdx.errors import CheckpointError
from hvdx.ops.objects import broadcast_object
from hvdx.training.under_strategy import is_of_hvdx

_FILES_OF_BACKUP = ("_weights_path", "_training_metadata_path", "_prev_weights_path", "_prev_training_metadata_path")


def adapt_written_files() -> None:
    """Adapt the callbacks of Keras 3, where it has been imported."""
    keras_api.change_method(keras_api.callback_class_of_keras_3("ModelCheckpoint"), "_save_model", _checkpoint_aside)
    backup = keras_api.callback_class_of_keras_3("BackupAndRestore")
    keras_api.change_method(backup, "_save_model", _backup_aside)
    keras_api.change_method(backup, "on_train_begin", _restored_everywhere)
    keras_api.change_method(backup, "on_train_end", _on_rank_0)
    board = keras_api.callback_class_of_keras_3("TensorBoard")
    keras_api.change_method(board, "set_model", _logged_aside)
    keras_api.change_method(board, "on_train_end", _logs_removed)


def _writes_aside(model: Any) -> bool:
    """Return whether this rank's files are not wanted."""
    strategy = model.distribute_strategy
    return is_of_hvdx(strategy) and world.size() > 1 and not strategy.extended.should_checkpoint


@contextlib.contextmanager
def _elsewhere(callback: Any, *paths: str) -> Iterator[None]:
    """Let attributes of a callback name files in a folder that is removed after the block."""
    before = {name: getattr(callback, name) for name in paths}
    with tempfile.TemporaryDirectory(prefix="hvdx-not-rank-0-") as folder:
        try:
            for name, path in before.items():
                setattr(callback, name, str(Path(folder, Path(path).name)))
            yield
        finally:
            for name, path in before.items():
                setattr(callback, name, path)


def _checkpoint_aside(original: Any) -> Any:
    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        with _elsewhere(self, "filepath") if _writes_aside(self.model) else contextlib.nullcontext():
            original(self, *args, **kwargs)

    return save


def _backup_aside(original: Any) -> Any:
    def save(self: Any) -> None:
        with (
            _elsewhere(self, "backup_dir", *_FILES_OF_BACKUP) if _writes_aside(self.model) else contextlib.nullcontext()
        ):
            original(self)

    return save


def _on_rank_0(original: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _writes_aside(self.model) else original(self, *args, **kwargs)

    return method


def _restored_everywhere(original: Any) -> Any:
    """Let every rank restore what rank 0 finds: the others need not see its files."""

    def on_train_begin(self: Any, logs: Any = None) -> None:
        if not is_of_hvdx(self.model.distribute_strategy) or world.size() == 1:
            original(self, logs)
            return
        failure, files = None, {}
        if world.rank() == 0:
            try:
                present = [name for name in _FILES_OF_BACKUP if Path(getattr(self, name)).exists()]
                files = {name: Path(getattr(self, name)).read_bytes() for name in present}
            except OSError as error:
                failure = str(error)
        failure, files = broadcast_object((failure, files), 0, name="the files of a backup")
        if failure is not None:
            raise CheckpointError(f"Rank 0 cannot read the backup in {self.backup_dir}: {failure}")
        with _elsewhere(self, *_FILES_OF_BACKUP) if world.rank() else contextlib.nullcontext():
            for name, content in files.items() if world.rank() else ():
                Path(getattr(self, name)).write_bytes(content)
            try:
                original(self, logs)
            except OSError as error:
                raise CheckpointError(f"The backup in {self.backup_dir} cannot be restored: {error}") from error

    return on_train_begin


def _logged_aside(original: Any) -> Any:
    def set_model(self: Any, model: Any) -> None:
        if not _writes_aside(model):
            original(self, model)
            return
        _remove(self)
        # removes itself with the callback, if training does not come to its end
        self._hvdx_folder = tempfile.TemporaryDirectory(prefix="hvdx-not-rank-0-", ignore_cleanup_errors=True)
        wanted, self.log_dir = self.log_dir, self._hvdx_folder.name
        try:
            original(self, model)
        finally:
            self.log_dir = wanted

    return set_model


def _logs_removed(original: Any) -> Any:
    def on_train_end(self: Any, logs: Any = None) -> None:
        original(self, logs)
        _remove(self)

    return on_train_end


def _remove(callback: Any) -> None:
    folder = callback.__dict__.pop("_hvdx_folder", None)
    if folder is not None:
        folder.cleanup()
