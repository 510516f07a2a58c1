"""Scenes of the mirrored strategy with a model of each Keras, beside the recipes."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvdx as hvd
from hvdx.distribute import strategy
from hvdx.distribute.cross_device import CrossDeviceOps
from hvdx.errors import OptimizerError, UnsupportedError, XlaError
from tests.distribute.mirrored_checks import check_mirrored, compare, devices, parts_of, refused
from tests.training.models import BATCH, dense, linear_data
from tests.training.support import Family, arrays, counting, optimizer_arrays, union


def play_loop(family: Family) -> None:
    """A loop of one's own equals one process; gradients travel once an update, wrapped or not."""
    for options in ({}, {"gradient_accumulation_steps": 2}) if family.keras_name == "keras3" else ({},):
        for wrapped in (False, True):
            _loop(family, options, wrapped)


def _loop(family: Family, options: dict[str, Any], wrapped: bool) -> None:
    mirrored = strategy("mirrored")
    data = union(linear_data(mirrored.num_replicas_in_sync))
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(BATCH * mirrored.num_replicas_in_sync)
    results = []
    for current in (mirrored, None):
        family.keras.utils.set_random_seed(7)
        with current.scope() if current else contextlib.nullcontext():
            model = dense(family.keras)
            optimizer = family.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.05, **options)
            if wrapped:
                optimizer.build(model.trainable_variables)
        if wrapped and current:
            hvd.DistributedOptimizer(optimizer)
        batches = list(current.experimental_distribute_dataset(dataset) if current else dataset)
        with _counted() as reductions:
            losses = _epoch(current, model, optimizer, batches)
        if current:
            # They are counted where a function is traced: twice, if it makes the optimizer's variables.
            assert reductions[0] == (1 if wrapped else 2), reductions
        results.append((model, optimizer, losses))
        if current and hvd.size() > 1:
            passes = options.get("gradient_accumulation_steps", 1)
            with counting() as collectives:
                _epoch(current, model, optimizer, batches, learn=False)
            assert collectives[0] == len(batches)  # of losses alone
            with counting() as collectives:
                _epoch(current, model, optimizer, batches)
            assert collectives[0] == len(batches) + len(batches) // passes
    (model, optimizer, losses), (reference, expected, loss) = results
    if hvd.size() > 1:
        _epoch(None, reference, expected, list(dataset))
    np.testing.assert_allclose(losses, loss, 1e-5)
    check_mirrored(model.weights)
    compare(arrays(model.weights), arrays(reference.weights), 1e-5, 1e-6, "weights")
    compare(optimizer_arrays(optimizer), optimizer_arrays(expected), 1e-5, 1e-6, "optimizer variables")


def _epoch(mirrored: Any, model: Any, optimizer: Any, batches: Any, learn: bool = True) -> list[float]:
    replicas = mirrored.num_replicas_in_sync if mirrored else 1

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / replicas
        if learn:
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def run(*batch: Any) -> Any:
        return mirrored.reduce("SUM", mirrored.run(step, batch), axis=None) if mirrored else step(*batch)

    return [float(run(*batch)) for batch in batches]


@contextlib.contextmanager
def _counted() -> Any:
    """Count how often values of several shapes, which gradients are, are summed over devices."""
    found, original = [0], CrossDeviceOps.sums

    def sums(self: Any, values: Any, *rest: Any) -> Any:
        found[0] += len(values) > 1
        return original(self, values, *rest)

    CrossDeviceOps.sums = sums  # type: ignore[method-assign]
    try:
        yield found
    finally:
        CrossDeviceOps.sums = original  # type: ignore[method-assign]


def play_overflow(family: Family) -> None:
    """An infinity in one replica skips the step in all of them; weights stay, the scale is halved, and it goes on."""
    mirrored = strategy("mirrored")
    replicas = mirrored.num_replicas_in_sync
    x, y = union(linear_data(replicas))
    with mirrored.scope():
        model = dense(family.keras)
        model.compile(family.loss_scale(family.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    batch = BATCH * replicas
    model.fit(x[:batch], y[:batch], batch, verbose=0)
    before = arrays(model.weights)
    iterations, scale = int(model.optimizer.iterations.numpy()), _scale(family, model.optimizer)
    bad = x[:batch].copy()
    bad[-1, 0] = np.inf  # of the last replica of the last rank
    model.fit(bad, y[:batch], batch, verbose=0, shuffle=False)
    for value, other in zip(arrays(model.weights), before, strict=True):
        np.testing.assert_array_equal(value, other)
    counts_skipped = int(family.keras_name != "keras3")  # as tf_keras and Keras 2 do
    assert int(model.optimizer.iterations.numpy()) == iterations + counts_skipped
    assert _scale(family, model.optimizer) == scale / 2
    model.fit(x[:batch], y[:batch], batch, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == iterations + 1 + counts_skipped
    assert not np.array_equal(arrays(model.weights)[0], before[0])
    check_mirrored(model.weights)


def _scale(family: Family, optimizer: Any) -> float:
    if family.keras_name == "keras3":
        return float(optimizer.dynamic_scale.numpy())
    return float(optimizer.loss_scale)


def play_moving_statistics(family: Family) -> None:
    """Batch normalization's are means over the replicas, each of which normalizes its own part of the batch."""
    mirrored = strategy("mirrored")
    replicas = mirrored.num_replicas_in_sync
    layers = family.keras.layers
    with mirrored.scope():
        model = family.keras.Sequential([layers.Input((5,)), layers.BatchNormalization(momentum=0.5), layers.Dense(3)])
        model.compile(family.optimizers.SGD(0.1), loss="mse")
    x, y = linear_data(replicas, steps=1)
    model.fit(*union((x, y)), BATCH * replicas, verbose=0, shuffle=False)
    normalization = model.layers[0]
    np.testing.assert_allclose(normalization.moving_mean.numpy(), 0.5 * x[0].mean(1).mean(0), 1e-5)
    np.testing.assert_allclose(normalization.moving_variance.numpy(), 0.5 + 0.5 * x[0].var(1).mean(0), 1e-5)


def play_dropout(family: Family) -> None:
    """No two replicas drop the same units, in no step; the dropout of tf_keras and Keras 2 knows no ranks."""
    mirrored = strategy("mirrored")
    with mirrored.scope():
        model = family.keras.Sequential([family.keras.layers.Input((64,)), family.keras.layers.Dropout(0.5)])
    step = tf.function(lambda: mirrored.run(lambda: model(tf.ones([1, 64]), training=True)))
    masks = [value.numpy().tobytes() for _ in range(2) for value in mirrored.experimental_local_results(step())]
    everywhere = list(chain.from_iterable(hvd.allgather_object(masks))) if family.keras_name == "keras3" else masks
    assert len(set(everywhere)) == len(everywhere) > devices()


def play_metrics(family: Family) -> None:
    """What evaluate says equals one process, also with a last batch that leaves replicas empty; predict keeps order."""
    mirrored = strategy("mirrored")
    replicas = mirrored.num_replicas_in_sync
    x, y = union(linear_data(replicas))
    x, y = x[: 2 * BATCH * replicas + 1], y[: 2 * BATCH * replicas + 1]
    results: list[list[float]] = []
    predicted: list[np.ndarray] = []
    for current in (mirrored, None):
        family.keras.utils.set_random_seed(3)
        with current.scope() if current else contextlib.nullcontext():
            model = dense(family.keras)
            model.compile(family.optimizers.SGD(0.0), loss="mse", metrics=["mae"])
        history = model.fit(x, y, BATCH * replicas, epochs=2, validation_data=(x, y), verbose=0, shuffle=False).history
        results.append([*model.evaluate(x, y, BATCH * replicas, verbose=0), history["val_loss"][1]])
        check_mirrored(model.weights) if current else None
        predicted.append(model.predict(x, BATCH * replicas, verbose=0))
    np.testing.assert_allclose(results[0], results[1], 1e-5)
    np.testing.assert_allclose(predicted[0], predicted[1], 1e-5, 1e-6)


def play_checkpoint(family: Family) -> None:
    """A model is saved and loaded, under the strategy and without; every part of every variable gets what was saved."""
    mirrored = strategy("mirrored")
    replicas = mirrored.num_replicas_in_sync
    data = union(linear_data(replicas))

    def made() -> Any:
        model = dense(family.keras)
        model.compile(family.optimizers.Adam(0.01, epsilon=1e-3), loss="mse")
        return model

    with mirrored.scope():
        model, other = made(), made()
    model.fit(*data, BATCH * replicas, verbose=0, shuffle=False)
    with tempfile.TemporaryDirectory() as folder:  # of each rank
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(Path(folder, "checkpoint")))
        with mirrored.scope():
            other.optimizer.build(other.trainable_variables)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path).assert_existing_objects_matched()
        model.save(Path(folder, "model.keras"))
        plain = family.keras.models.load_model(Path(folder, "model.keras"))
        with mirrored.scope():
            loaded = family.keras.models.load_model(Path(folder, "model.keras"))
    compare(arrays(plain.weights), arrays(model.weights), 0, 0, "weights of the plain model")
    for one in (other, loaded):
        compare(arrays(one.weights), arrays(model.weights), 0, 0, "weights")
        for variable, value in zip(one.weights, arrays(model.weights), strict=True):
            for part in parts_of(variable):
                np.testing.assert_array_equal(part, value)
        one.fit(*data, BATCH * replicas, verbose=0, shuffle=False)
    plain.fit(*data, BATCH * replicas, verbose=0, shuffle=False)
    for one in (other, loaded):
        compare(arrays(one.weights), arrays(plain.weights), 1e-5, 1e-6, "weights after going on")


def play_refusals(family: Family) -> None:
    """What cannot be right is refused in words, and leaves the strategy in use."""
    mirrored = strategy("mirrored")
    x, y = union(linear_data(mirrored.num_replicas_in_sync, steps=1))

    def trained(optimizer: Any, **options: Any) -> None:
        with mirrored.scope():
            model = dense(family.keras)
            model.compile(optimizer() if callable(optimizer) else optimizer, loss="mse", **options)
        model.fit(x, y, len(x), verbose=0)

    sgd = family.optimizers.SGD
    assert "jit_compile=False" in refused(XlaError, lambda: trained(lambda: sgd(0.1), jit_compile=True))
    minimum = refused(UnsupportedError, lambda: trained(lambda: hvd.DistributedOptimizer(sgd(0.1), "min")))
    assert "op=MIN" in minimum
    if family.keras_name == "keras3":
        outside = sgd(0.1)
        assert "SGD was made outside of the strategy's scope" in refused(OptimizerError, lambda: trained(outside))
    else:
        two = refused(
            UnsupportedError,
            lambda: trained(lambda: hvd.DistributedOptimizer(sgd(0.1), backward_passes_per_step=2)),
        )
        assert "backward_passes_per_step=2" in two
    assert devices() > 1
    trained(lambda: sgd(0.1))


def play_callbacks(family: Family) -> None:
    """Files are written by rank 0, to a place that all share; what was backed up is restored on every device."""
    mirrored = strategy("mirrored")
    replicas = mirrored.num_replicas_in_sync
    data = union(linear_data(replicas))
    callbacks = family.keras.callbacks
    folder = hvd.broadcast_object(tempfile.mkdtemp(), 0)

    def trained(epochs: int) -> Any:
        family.keras.utils.set_random_seed(5)
        with mirrored.scope():
            layers = family.keras.layers
            model = family.keras.Sequential([layers.Input((5,)), layers.BatchNormalization(), layers.Dense(3)])
            model.compile(family.optimizers.SGD(0.1, momentum=0.5), loss="mse")
        backup = callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=False)
        best = callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.weights.h5", save_weights_only=True)
        model.fit(*data, BATCH * replicas, epochs=epochs, verbose=0, shuffle=False, callbacks=[backup, best])
        return model

    trained(1)
    hvd.barrier()
    model = trained(3)  # goes on after the first
    hvd.barrier()
    assert sorted(path.name for path in Path(folder).glob("*.h5")) == [f"{epoch}.weights.h5" for epoch in (1, 2, 3)]
    weights = arrays(model.weights)
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)
    hvd.barrier()
    folder = hvd.broadcast_object(tempfile.mkdtemp(), 0)
    compare(weights, arrays(trained(3).weights), 1e-5, 1e-6, "weights")
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)


# -- a tape of hvdx's --------------------------------------------------------------------------------------------------


def play_tape_and_update(family: Family) -> None:
    """What a tape has reduced is reduced no more by Keras 3's update; what was computed from it is."""
    mirrored, replicas = strategy("mirrored"), devices() * hvd.size()
    ops, exchanges = mirrored.extended.hvdx_ops, []
    sums = ops.sums
    ops.sums = lambda *args: exchanges.append(len(args[0])) or sums(*args)
    with mirrored.scope():
        model = family.keras.Sequential([family.keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
        model.build((None, 2))
        optimizer = family.optimizers.SGD(0.5)

    def step(changed: bool) -> None:
        factor = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group + 1, tf.float32)
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = factor * tf.reduce_sum(model(tf.ones([1, 2])))
        [gradient] = tape.gradient(loss, model.trainable_variables)
        gradient = tf.identity(gradient) if changed else gradient
        optimizer.apply_gradients([(gradient, model.trainable_variables[0])])

    expected = np.ones([2, 1])
    for changed in (False, True):
        for run in (mirrored.run, tf.function(mirrored.run)):
            exchanges.clear()
            run(step, (changed,))
            expected -= 0.5 * sum(range(1, replicas + 1))
            np.testing.assert_allclose(arrays(model.weights)[0], expected)
            assert family.keras_name != "keras3" or exchanges == [1] * (1 + changed)
    check_mirrored(model.weights)
