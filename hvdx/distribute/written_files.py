"""Keras 3's callbacks that write files, under a strategy with several ranks: rank 0 writes, every rank restores.

tf_keras and Keras 2 ask the strategy who writes. Keras 3 writes on every rank to the same place, and restores on every
rank what it finds there. As tf_keras does it, the others write to a place of their own that is removed: what is saved
may hold variables that are reduced over all ranks as they are read, so that all must save.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdx import keras_api, world
from hvdx.errors import CheckpointError
from hvdx.ops.broadcast import broadcast_variables
from hvdx.ops.objects import broadcast_object
from hvdx.training.under_strategy import is_of_hvdx

_PATHS_OF_BACKUP = (
    "backup_dir",
    "_weights_path",
    "_training_metadata_path",
    "_prev_weights_path",
    "_prev_training_metadata_path",
)


def adapt_written_files() -> None:
    """Adapt the callbacks of Keras 3, where it has been imported."""
    keras_api.change_method(keras_api.callback_class_of_keras_3("ModelCheckpoint"), "_save_model", _aside("filepath"))
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


def _aside(*paths: str) -> Callable[[Any], Any]:
    """Return the change by which a method writes to a folder of its own on the ranks whose files are not wanted."""
    if paths not in _changes:  # the same change is made once, however often it is asked for

        def change(original: Any) -> Any:
            def save(self: Any, *args: Any, **kwargs: Any) -> Any:
                if not _writes_aside(self.model):
                    return original(self, *args, **kwargs)
                before = {name: getattr(self, name) for name in paths}
                with tempfile.TemporaryDirectory(prefix="hvdx-not-rank-0-") as folder:
                    try:
                        for name, path in before.items():
                            setattr(self, name, str(Path(folder, Path(path).name)))
                        return original(self, *args, **kwargs)
                    finally:
                        for name, path in before.items():
                            setattr(self, name, path)

            return save

        _changes[paths] = change
    return _changes[paths]


_changes: dict[tuple[str, ...], Callable[[Any], Any]] = {}


def _backup_aside(original: Any) -> Any:
    return _aside(*_PATHS_OF_BACKUP)(original)


def _on_rank_0(original: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _writes_aside(self.model) else original(self, *args, **kwargs)

    return method


def _restored_everywhere(original: Any) -> Any:
    """Let rank 0 restore, and the others get what it has: they need not see its files."""

    def on_train_begin(self: Any, logs: Any = None) -> None:
        if not is_of_hvdx(self.model.distribute_strategy) or world.size() == 1:
            original(self, logs)
            return
        failure, found = None, False
        if world.rank() == 0:
            found = Path(self._weights_path).exists() or Path(self._prev_weights_path).exists()
            try:
                original(self, logs)
            except Exception as error:
                failure = f"Rank 0 cannot restore {self.backup_dir}: {type(error).__name__}: {error}"
        failure, found, epoch = broadcast_object((failure, found, self.model._initial_epoch), 0, name="a backup")
        if failure is not None:
            raise CheckpointError(failure)
        if found:
            optimizer = self.model.optimizer
            if optimizer is not None and not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            broadcast_variables([*self.model.weights, *keras_api.optimizer_variables(optimizer)], 0)
            self.model._initial_epoch = epoch

    return on_train_begin


def _logged_aside(original: Any) -> Any:
    def set_model(self: Any, model: Any) -> None:
        if not _writes_aside(model):
            original(self, model)
            return
        wanted = self.log_dir
        self._hvdx_folder = self.log_dir = tempfile.mkdtemp(prefix="hvdx-not-rank-0-")
        try:
            original(self, model)
        finally:
            self.log_dir = wanted

    return set_model


def _logs_removed(original: Any) -> Any:
    def on_train_end(self: Any, logs: Any = None) -> None:
        original(self, logs)
        if _writes_aside(self.model):
            shutil.rmtree(self._hvdx_folder, ignore_errors=True)

    return on_train_end
