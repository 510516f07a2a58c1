"""What workers train in the tests of `strategy("parameter_server")`: out of step, saved, and with members that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.distribute import strategy
from tests.distribute.parameter_server_recipes import PIECE_BYTES, compare
from tests.distribute.parameter_server_strategy_scenes import check_equal_on_workers, outcome
from tests.training.models import BATCH, dense, linear_data
from tests.training.support import FAMILIES, Family, arrays, optimizer_arrays, union

# -- asynchronous ------------------------------------------------------------------------------------------------------


def play_asynchronous(folder: Path) -> dict[str, str]:
    """Training out of step with every Keras: no update is lost or doubled, and nobody leads by more than the bound."""
    return {f"asynchronous-{family}": outcome(lambda f=family: _asynchronous(f)) for family in FAMILIES}


def _asynchronous(family: Family) -> None:
    keras, bound = family.keras, 2
    made = strategy("parameter_server", updates="asynchronous", staleness=bound, piece_bytes=PIECE_BYTES)
    assert made.num_replicas_in_sync == 1
    keras.utils.set_random_seed(hvd.rank())
    with made.scope():
        model = dense(keras)
        model.compile(family.optimizers.Adam(0.02, global_clipnorm=5.0), "mse", metrics=["mae"])
    check_equal_on_workers(model)
    x = np.random.default_rng(0).normal(size=(192, 5)).astype("float32")
    y = np.tanh(x[:, :3])
    steps: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    losses = model.fit(x, y, 12, epochs=8, verbose=0, callbacks=[count]).history["loss"]
    assert len(steps) == 8 * 192 // 12

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for _ in range(5 + hvd.rank()):
        made.run(step)
    hvd.barrier()
    made.pull(model)
    check_equal_on_workers(model)
    assert made.reduce("SUM", made.run(lambda: tf.constant(3.0)), axis=None) == 3.0, "a value is that of one worker"
    assert np.mean((np.asarray(model(x)) - y) ** 2) < 0.3 * losses[0], losses
    total = 2 * len(steps) + 11
    for stats in made.counters(model):
        assert stats["updates"] == stats["pushes"] == stats["gradients_applied"] == total, (stats, total)
        assert stats["duplicates"] == stats["dropped"] == 0
        assert stats["greatest_staleness"] <= bound


# -- saving ------------------------------------------------------------------------------------------------------------


def play_saved(folder: Path) -> dict[str, str]:
    """What is saved in the midst of training is what the servers hold; what is changed between trainings counts."""
    return {f"saved-{family}": outcome(lambda f=family: _saved(f, folder / f"saved-{f}")) for family in FAMILIES}


def _saved(family: Family, folder: Path) -> None:
    keras = family.keras
    made = strategy("parameter_server", piece_bytes=PIECE_BYTES)
    with made.scope():
        model = dense(keras)
        model.compile(family.optimizers.Adam(0.01, epsilon=1e-3), "mse")

    class Saver(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:  # on all workers: of a metric a checkpoint holds what all have counted
                model.save(own / "model.keras")
                tf.train.Checkpoint(optimizer=model.optimizer, model=model).write(str(own / "checkpoint"))

    own = folder / str(hvd.rank())
    own.mkdir(parents=True, exist_ok=True)
    callbacks = [Saver(), hvd.callbacks.CheckpointCallback(folder / "epochs", keep=9)]
    _train(model, 3, callbacks=callbacks)
    keras.utils.set_random_seed(0)
    reference = keras.models.clone_model(model)
    reference.compile(family.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    # every way of saving holds the weights and slots of two epochs: one more in one process, and all are the same
    loaded = keras.models.load_model(own / "model.keras")
    _train(loaded, 1)
    _alike(loaded, model)
    reference.optimizer.build(reference.trainable_variables)
    tf.train.Checkpoint(optimizer=reference.optimizer, model=reference).read(str(own / "checkpoint"))
    _train(reference, 1)
    _alike(reference, model)
    _saved_on_servers(family, model, made, folder, own)


def _saved_on_servers(family: Family, model: Any, made: Any, folder: Path, own: Path) -> None:
    """Go on from a state of the servers, and from what was given to this worker's model."""
    keras = family.keras
    made.save(model, folder / "servers.npz")
    _train(model, 1)
    hvd.barrier()
    after = arrays(model.weights)
    with made.scope():
        other = keras.models.clone_model(model)
        other.compile(family.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    made.restore(other, folder / "servers.npz")
    _train(other, 1)
    compare(arrays(other.weights), after, 1e-6, 1e-7, "restored from the servers' state")
    model.set_weights([value * 0 for value in after])
    _train(model, 1)
    reference = keras.models.load_model(own / "model.keras")
    _train(reference, 2)
    reference.set_weights([value * 0 for value in after])
    _train(reference, 1)
    _alike(model, reference)


def _train(model: Any, epochs: int, **options: Any) -> None:
    data = union(linear_data(hvd.size()))
    model.fit(*data, BATCH * hvd.size(), epochs=epochs, verbose=0, shuffle=False, **options)


def _alike(model: Any, other: Any) -> None:
    compare(arrays(model.weights), arrays(other.weights), 1e-5, 1e-6, "weights")
    compare(optimizer_arrays(model.optimizer), optimizer_arrays(other.optimizer), 1e-5, 1e-6, "optimizer variables")


# -- faults ------------------------------------------------------------------------------------------------------------


def play_dying(folder: Path) -> None:
    """Worker 1 dies in the midst of asynchronous training; worker 0 finishes."""
    keras = FAMILIES[0].keras
    made = strategy("parameter_server", updates="asynchronous", staleness=4)
    with made.scope():
        model = dense(keras)
        model.compile(FAMILIES[0].optimizers.SGD(0.01), "mse")

    class Dying(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hvd.rank() and batch == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    x, y = union(linear_data(8))
    model.fit(x, y, BATCH, epochs=3, verbose=0, callbacks=[Dying()])
    [stats, _] = made.counters(model)
    assert stats["workers"][1]["gone"] == "was ended by signal 9 (SIGKILL)", stats
    assert stats["updates"] == 3 * len(x) // BATCH + stats["workers"][1]["clock"], stats


EPOCHS = 5


def play_restarted(folder: Path) -> None:
    """Two models are in training, each saved in its way, when a server dies; on the second start both go on."""
    family = FAMILIES[0]
    keras = family.keras
    resumes = (folder / "epochs").exists()
    made = strategy("parameter_server", piece_bytes=PIECE_BYTES)

    def compiled() -> Any:
        keras.utils.set_random_seed(hvd.rank())
        model = dense(keras)
        model.compile(family.optimizers.Adam(0.01, epsilon=1e-3), "mse")
        return model

    def kill() -> None:
        if hvd.rank() == 0:
            os.kill(int((folder / "server-1.pid").read_text()), signal.SIGKILL)

    class Watcher(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        """Does something after the second step of the third epoch, unless training goes on from there."""

        def __init__(self, then: Callable[[], None]) -> None:
            super().__init__()
            self.then, self.epochs = then, []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epochs.append(epoch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (self.epochs[-1], batch) == (2, 1) and not resumes:
                self.then()

        def on_train_end(self, logs: Any = None) -> None:
            assert self.epochs == list(range(2, EPOCHS)), "it goes on after the last epoch that was saved"

    with made.scope():
        model, other = compiled(), compiled()

    def train_other() -> None:
        _train(other, EPOCHS, callbacks=[hvd.callbacks.CheckpointCallback(folder / "epochs"), Watcher(kill)])

    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
    _train(model, EPOCHS, callbacks=[backup, Watcher(train_other)])
    assert resumes
    train_other()
    if hvd.rank() == 0:
        reference = compiled()
        _train(reference, EPOCHS)
        _alike(model, reference)
        _alike(other, reference)
    hvd.shutdown()
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)  # what it had last
    assert len(store) == len(optimizer_arrays(model.optimizer))
    with pytest.raises(hvd.WorldError, match="This worker has left its parameter servers"):
        made.pull(model)
