"""`CheckpointCallback`: rank 0 writes whole files, and the same script, started again, goes on where it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from hvdx import keras_api, world
from hvdx.comm.reduce_op import is_numeric
from hvdx.comm.signature import without_counters
from hvdx.data.epochs import skip_to
from hvdx.distribute.adopt import is_served
from hvdx.errors import CheckpointError, ConfigurationError
from hvdx.logs import log
from hvdx.ops.broadcast import broadcast_variables, variable_name
from hvdx.ops.convert import to_tensor
from hvdx.ops.objects import allgather_object, broadcast_object
from hvdx.version import __version__
from keras_callbacks import callback_list, checkpoint_file, step_function
from keras_callbacks.base import LAST, Callback
from keras_callbacks.learning_rate_schedule import LearningRateScheduleCallback as RateCallback


class CheckpointCallback(Callback):
    """Save the training so that the same script, started again, goes on after the last saved epoch; collective.

    A checkpoint holds the weights, and of the optimizer slots, iterations, learning rate and loss scale. Rank 0 writes
    it after all other callbacks of the epoch, so that it has what they decided; when it is written, all ranks go on.
    A file appears whole or not at all. At the start of `fit`, rank 0 reads the newest whole file, and the others get
    epoch and variables from it: they need not see the directory. A `fit` whose epochs are all done ends at once. The
    states of random layers and of other callbacks (the patience of EarlyStopping) are not saved.

    Args:
        directory: where the files `epoch-00001.npz`, ... go; one directory belongs to one `fit`. Made if absent.
        keep: how many of the newest files stay, at least 1.
        save_freq: "epoch", or a number of epochs between two files; the last epoch is always saved.

    Raises:
        ConfigurationError: an option has no meaning.
        CheckpointError: on every rank, where rank 0 cannot read or write (no whole file is left, the disk is full), or
            where the checkpoint is of another model or optimizer; names the first difference. Nothing is overwritten.
    """

    position = LAST

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3, save_freq: str | int = "epoch") -> None:
        super().__init__()
        if not str(directory):
            raise ConfigurationError("directory is empty. Pass the name of a directory for the checkpoints.")
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigurationError(f"keep is a number of files, 1 or more. Received: {keep!r}.")
        every = 1 if save_freq == "epoch" else save_freq
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigurationError(f"save_freq is 'epoch' or a number of epochs, 1 or more. Received: {save_freq!r}.")
        self.directory = Path(directory)
        self.keep = keep
        self.every = every
        self.resumed = False
        """Whether this fit goes on from a checkpoint, whose learning rate is then in force."""
        self._container: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._container = callback_list.find(self)
        if self._container is not None:
            callback_list.arrange(self._container)
        arrays: list[np.ndarray] = []
        description: dict[str, Any] | None = None
        failure = None
        if world.rank() == 0:
            try:
                checkpoint_file.prepare(self.directory)
                found = checkpoint_file.newest(self.directory)
                description, arrays = found[1:] if found else (None, [])
            except (CheckpointError, OSError) as error:
                failure = f"Rank 0 cannot use the checkpoint directory {self.directory}: {error}"
        description = self._from_rank_0(description, failure, "the checkpoint to go on from")
        keras_api.set_initial_epoch(self.model, None)
        self.resumed = description is not None
        if description is not None:
            self._resume(description, arrays)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # It has had its effect, and must have none on a later fit, even if this one fails.
        keras_api.set_initial_epoch(self.model, None)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        done = epoch + 1
        if done % self.every == 0 or done == self.params.get("epochs") or self.model.stop_training:
            self._save(done)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        keras_api.set_initial_epoch(self.model, None)
        step_function.remove(self.model)

    def _save(self, epoch: int) -> None:
        failure = None
        if world.rank() == 0:
            for optimizer in filter(is_served, keras_api.optimizers(self.model)):
                keras_api.inner_optimizer(optimizer).hvdx_fill()  # what parameter servers hold
            variables = _variables(self.model)
            arrays = [np.array(to_tensor(variable)) for variable in variables]
            description = {"epoch": epoch, "hvdx": __version__, "ranks": world.size(), **_describe(variables)}
            try:
                checkpoint_file.write(checkpoint_file.path_of(self.directory, epoch), arrays, description)
                checkpoint_file.prune(self.directory, self.keep)
            except OSError as error:
                failure = f"Rank 0 cannot write the checkpoint of epoch {epoch} to {self.directory}: {error}"
        self._from_rank_0(None, failure, f"checkpoint of epoch {epoch}")

    def _from_rank_0(self, value: Any, failure: str | None, what: str) -> Any:
        """Return rank 0's value on all ranks, or raise its failure on all ranks."""
        value, failure = broadcast_object((value, failure), 0, name=what)
        if failure is not None:
            raise CheckpointError(failure)
        return value

    def _resume(self, description: dict[str, Any], arrays: list[np.ndarray]) -> None:
        epoch = description["epoch"]
        compiled = _rate(self.model)

        def restore() -> None:
            chosen = _rate(self.model)
            _restore(self.model, description, arrays)
            # Where the model is built only in its first step, callbacks have chosen this epoch's rate before.
            schedules = [c for c in callback_list.neighbours(self._container) if isinstance(c, RateCallback)]
            if not any(callback.set_again() for callback in schedules) and chosen != compiled:
                keras_api.set_learning_rate(self.model.optimizer, chosen)  # type: ignore[arg-type]

        built = step_function.when_built(self.model, restore)
        if not built and epoch >= self.params.get("epochs", epoch + 1):
            raise CheckpointError(
                f"The training in {self.directory} is finished (epoch {epoch}), and its weights cannot be restored, as "
                "the model has none before its first step. Call the model on one batch before fit."
            )
        keras_api.set_initial_epoch(self.model, epoch)
        skip_to(epoch)  # the order in which hvd.shard reads goes on too
        if world.rank() == 0:
            log.info("going on after epoch %d of %s", epoch, self.directory)


def _rate(model: Any) -> float | None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not keras_api.learning_rate_is_number(optimizer):
        return None
    return keras_api.learning_rate(optimizer)


def _variables(model: Any) -> list[Any]:
    """Return what a checkpoint holds, in order."""
    found = list(model.weights)
    for optimizer in keras_api.optimizers(model):
        found += keras_api.optimizer_variables(optimizer)
    return [variable for variable in found if _holds_numbers(variable)]


def _holds_numbers(variable: Any) -> bool:
    try:
        return is_numeric(np.dtype(to_tensor(variable).dtype.as_numpy_dtype))
    except TypeError:
        return False


def _describe(variables: list[Any]) -> dict[str, Any]:
    return {
        "names": [variable_name(variable) for variable in variables],
        "shapes": [[int(n) for n in variable.shape] for variable in variables],
    }


def _restore(model: Any, description: dict[str, Any], arrays: list[np.ndarray]) -> None:
    """Give all ranks the checkpoint's variables, after they have agreed that it is one of this model."""
    variables = _variables(model)
    found = difference(description, {**_describe(variables), "dtypes": [_dtype(variable) for variable in variables]})
    answers = allgather_object(found, name="whether the checkpoint is one of this model")
    for rank, answer in enumerate(answers):
        if answer is not None:
            raise CheckpointError(
                f"The checkpoint of epoch {description['epoch']} is not one of this model and optimizer (rank {rank}): "
                f"{answer}. Nothing was changed. Use another directory, or the model that wrote it."
            )
    if world.rank() == 0:
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)
    broadcast_variables(variables, 0)


def difference(saved: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Return the first difference between a checkpoint's variables and the model's, or None.

    Args:
        saved, here: `names`, `shapes` and `dtypes` of the variables, in order. Counters in names ("dense_3") do not
            count, as they depend on what else a program has built.
    """
    columns = ("names", "shapes", "dtypes")
    rows, rows_here = (zip(*(side[column] for column in columns), strict=True) for side in (saved, here))
    for (name, shape, dtype), (name_here, shape_here, dtype_here) in zip(rows, rows_here, strict=False):
        same_name = without_counters(name) == without_counters(name_here)
        if not same_name or list(shape) != list(shape_here) or dtype != dtype_here:
            return (
                f"it has {name} {'x'.join(map(str, shape)) or 'scalar'} {dtype} where the model has {name_here} "
                f"{'x'.join(map(str, shape_here)) or 'scalar'} {dtype_here}"
            )
    if len(saved["names"]) != len(here["names"]):
        longer = max(saved["names"], here["names"], key=len)
        extra = longer[min(len(saved["names"]), len(here["names"]))]
        whose = "the checkpoint" if longer is saved["names"] else "the model"
        return (
            f"it has {len(saved['names'])} variables and the model {len(here['names'])}; the first that only {whose} "
            f"has is {extra}"
        )
    return None


def _dtype(variable: Any) -> str:
    return np.dtype(to_tensor(variable).dtype.as_numpy_dtype).name
