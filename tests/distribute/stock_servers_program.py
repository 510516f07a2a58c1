"""What every member of a job runs in the tests of TensorFlow's own parameter servers: `program.py KERAS`."""

from __future__ import annotations

import importlib
import sys
import time

import numpy as np
import tensorflow as tf

from hvdx.distribute import strategy


def main() -> None:
    """Train; only the coordinator comes past the first line."""
    made = strategy("parameter_server", backend="tensorflow")
    print(made.describe(), flush=True)
    keras = importlib.import_module(sys.argv[1])
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(256, 5)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :3] * 0.5)).shuffle(256).repeat().batch(16)
    with made.scope():
        layers = keras.layers
        model = keras.Sequential([layers.Input((5,)), layers.Dense(8, activation="tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=4)
    losses = model.fit(data, epochs=5, steps_per_epoch=16, verbose=0).history["loss"]
    assert losses[-1] < 0.3 * losses[0], losses
    places = sorted({tf.DeviceSpec.from_string(v.device).task for v in model.trainable_variables})
    print(f"trained: variables on servers {places}, computed by workers {_computing(made)}")


def _computing(made: tf.distribute.Strategy) -> list[int]:
    """Return the numbers of the workers on which the coordinator lets functions run."""
    coordinator = tf.distribute.coordinator.ClusterCoordinator(made)

    @tf.function
    def compute() -> tf.Tensor:
        return tf.linalg.svd(tf.random.normal([200, 200]), compute_uv=False)

    found: set[int] = set()
    end = time.monotonic() + 30  # a worker that has not begun gets none while another one is quick
    while len(found) < 2 and time.monotonic() < end:
        values = [coordinator.schedule(compute) for _ in range(16)]
        coordinator.join()
        found |= {tf.DeviceSpec.from_string(value._get_values().backing_device).task for value in values}
    return sorted(found)


if __name__ == "__main__":
    main()
