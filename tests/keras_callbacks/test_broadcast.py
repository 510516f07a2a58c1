"""BroadcastGlobalVariablesCallback: equal weights and optimizer state before the first step, different dropout."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdx as hvd
from hvdx import keras_api
from hvdx.keras_api import seed_of_rank
from hvdx.ops.convert import to_tensor
from keras_callbacks.step_function import StepFunction

pytestmark = pytest.mark.np(2)

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = (X @ np.ones((4, 1), "float32")).astype("float32")


class BeforeStep(hvd.callbacks.BroadcastGlobalVariablesCallback):
    """Records the state as the first step finds it."""

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__(root_rank)
        self.state: list[np.ndarray] = []

    def _broadcast(self) -> None:
        super()._broadcast()
        self.state = state(self.model)


def state(model: Any) -> list[np.ndarray]:
    variables = [*model.weights, *(v for o in keras_api.optimizers(model) for v in keras_api.optimizer_variables(o))]
    return [np.array(to_tensor(v)) for v in variables]


def trained(model: Any) -> list[np.ndarray]:
    """What gradients change: moving statistics of batch normalization are each rank's own."""
    return [np.array(to_tensor(v)) for v in model.trainable_weights]


def functional(keras: Any) -> Any:
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])


def deferred(keras: Any) -> Any:
    return keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)])


def subclassed(keras: Any) -> Any:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(3)
            self.out = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.out(self.hidden(x))

    return Net()


def own_step(keras: Any) -> Any:
    import tensorflow as tf

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.out(x)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
            return {"loss": loss}

    return Net()


def shard() -> tuple[np.ndarray, np.ndarray]:
    return X[hvd.rank() :: hvd.size()], Y[hvd.rank() :: hvd.size()]


def same_everywhere(arrays: list[np.ndarray]) -> bool:
    """Collective: whether all ranks hold the same bits."""
    return len({tuple(a.tobytes() for a in rank) for rank in hvd.allgather_object(arrays)}) == 1


@pytest.mark.parametrize("make", [functional, deferred, subclassed, own_step])
@pytest.mark.parametrize("eager", [False, True])
def test_every_rank_starts_from_the_root(keras: Any, make: Callable[[Any], Any], eager: bool) -> None:
    keras.utils.set_random_seed(hvd.rank())
    model = make(keras)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1 / (1 + hvd.rank()))), "mse", run_eagerly=eager)
    callback = BeforeStep(root_rank=hvd.size() - 1)
    model.fit(*shard(), batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    names = len(model.weights) + 2 * len(model.trainable_weights)
    equal_before, equal_after = same_everywhere(callback.state), same_everywhere(trained(model))
    assert len(callback.state) >= names + 2  # weights, two slots each, iterations, learning rate
    assert equal_before
    assert equal_after
    assert not isinstance(model.train_function, StepFunction)
    assert not isinstance(model.test_function, StepFunction)
    assert np.isclose(keras_api.learning_rate(model.optimizer), 0.1 / hvd.size())


def test_several_steps_per_execution(keras: Any) -> None:
    keras.utils.set_random_seed(hvd.rank())
    model = deferred(keras)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", steps_per_execution=2)
    callback = BeforeStep()
    model.fit(*shard(), batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    equal_before, equal_after = same_everywhere(callback.state), same_everywhere(trained(model))
    assert equal_before
    assert equal_after


@pytest.mark.parametrize("eager", [False, True])
def test_the_lazily_built_model_sees_every_batch_once(keras: Any, eager: bool) -> None:
    model = subclassed(keras)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=eager)
    model.fit(*shard(), batch_size=4, epochs=1, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback()])
    steps = -(-len(shard()[0]) // 4)
    assert int(np.array(to_tensor(model.optimizer.iterations))) == steps


def test_mixed_float16_broadcasts_the_loss_scale(keras: Any) -> None:
    lso = keras.mixed_precision.LossScaleOptimizer
    model = functional(keras)
    optimizer = lso(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), initial_scale=8.0 * (1 + hvd.rank()))
    model.compile(optimizer, "mse")
    callback = BeforeStep()
    model.fit(*shard(), batch_size=8, epochs=1, verbose=0, callbacks=[callback])
    equal = same_everywhere(callback.state)
    assert equal
    assert any(value.shape == () and value == 8.0 for value in callback.state)


@pytest.mark.np(2, 3)
def test_dropout_differs_between_ranks(keras: Any) -> None:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    seen: list[np.ndarray] = []

    class Mask(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            import tensorflow as tf

            tf.py_function(lambda value: seen.append(value.numpy()) or 0.0, [x], tf.float32)
            return x

    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dropout(0.5), Mask(), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    ones = np.ones((8, 64), "float32") * (1 + hvd.rank() * 1e-3)
    model.fit(ones, np.ones((8, 1)), batch_size=8, epochs=2, verbose=0,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback()])  # fmt: skip
    masks = hvd.allgather_object([value > 0 for value in seen])
    for mine in range(hvd.size()):
        assert len(masks[mine]) == 2
        assert not np.array_equal(masks[mine][0], masks[mine][1])
        for other in range(mine):
            assert not np.array_equal(masks[mine][0], masks[other][0])


def test_seeds_of_ranks() -> None:
    seeds = [seed_of_rank(1234, distance) for distance in range(1000)]
    assert seeds[0] == 1234
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_warns_when_the_optimizer_is_not_distributed(keras: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = functional(keras)
    model.compile("sgd", "mse")
    logging.getLogger("hvdx").addHandler(caplog.handler)
    try:
        model.fit(*shard(), batch_size=8, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback()])
    finally:
        logging.getLogger("hvdx").removeHandler(caplog.handler)
    assert ("trains a model of its own" in caplog.text) == (hvd.size() > 1)


def test_refuses_xla(keras: Any) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank exchanges nothing")
    model = functional(keras)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    with pytest.raises(hvd.XlaError, match="jit_compile=False"):
        model.fit(*shard(), verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback()])


def test_refuses_an_optimizer_of_another_keras() -> None:
    import keras as one

    other = pytest.importorskip("tf_keras")
    model = functional(other)
    model.compile("sgd", "mse")
    vars(model)["optimizer"] = one.optimizers.SGD(0.1)
    with pytest.raises(hvd.OptimizerError, match="take both from the same Keras"):
        hvd.callbacks.BroadcastGlobalVariablesCallback().set_model(model)


@pytest.mark.parametrize("turn", [False, True])
def test_compile_refuses_a_distributed_optimizer_of_another_keras(turn: bool) -> None:
    import keras as one

    other = pytest.importorskip("tf_keras")
    of_model, of_optimizer = (other, one) if turn else (one, other)
    optimizer = hvd.DistributedOptimizer(of_optimizer.optimizers.SGD(0.1))
    with pytest.raises(hvd.OptimizerError, match="take both from the same Keras"):
        functional(of_model).compile(optimizer, "mse")
    with pytest.raises(hvd.OptimizerError, match="take both from the same Keras"):
        functional(of_model).compile(loss="mse", optimizer=optimizer)


def test_root_out_of_range(keras: Any) -> None:
    model = functional(keras)
    model.compile("sgd", "mse")
    with pytest.raises(hvd.ConfigurationError, match="root rank"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(hvd.size()).set_model(model)


@pytest.mark.np(plain=True)
@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_alone_nothing_changes(keras: Any, lazily: bool, eager: bool, tmp_path: Path) -> None:
    """A world of one rank trains bit for bit what Keras trains without hvdx, random layers included."""
    weights = []
    for distributed in (False, True):
        keras.utils.set_random_seed(5)
        first = [] if lazily else [keras.layers.Input((4,))]
        model = keras.Sequential(
            [*first, keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.BatchNormalization(),
             keras.layers.Dense(1)]
        )  # fmt: skip
        optimizer = keras.optimizers.Adam(0.05)
        model.compile(hvd.DistributedOptimizer(optimizer) if distributed else optimizer, "mse", run_eagerly=eager)
        mine = [
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.BroadcastGlobalVariablesCallback(),
            hvd.callbacks.CheckpointCallback(tmp_path),
        ]
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=mine if distributed else [])
        weights.append(model.get_weights())
    for alone, wrapped in zip(*weights, strict=True):
        np.testing.assert_array_equal(alone, wrapped)
