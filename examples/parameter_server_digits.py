"""The digits of keras_digits.py through parameter servers: workers push gradients, servers update and hold the weights.

    hvdxrun -np 2 --servers 2 python examples/parameter_server_digits.py
    hvdxrun -np 2 --servers 2 python examples/parameter_server_digits.py --asynchronous

The program is the same for workers and servers: where it makes the strategy, a server serves, until all are done.
Runs on Keras 3 and on TensorFlow 2.15 with Keras 2.15; needs the extra hvdx[parameter-server].
"""

from __future__ import annotations

import argparse
import time

import _quiet  # noqa: F401  (first: it imports TensorFlow without its start-up lines)
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdx as hvd
from hvdx.distribute import strategy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=32, help="samples a step of one worker (default 32)")
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--asynchronous", action="store_true", help="update as gradients arrive, without waiting for all")
parser.add_argument("--staleness", type=int, default=4, help="asynchronous: by how many steps a worker may lead")
options = parser.parse_args()

if options.asynchronous:
    servers = strategy("parameter_server", updates="asynchronous", staleness=options.staleness)
else:
    servers = strategy("parameter_server")

# A server does not come here.
boss = hvd.rank() == 0
if boss:
    print(servers.describe(), flush=True)
keras.utils.set_random_seed(1 + hvd.rank())  # the weights differ until the strategy makes them those of worker 0
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
x, x_test, y, y_test = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
# Every batch is cut among the workers.
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0)
data = data.batch(options.batch_size * hvd.size(), drop_remainder=True)

layers = keras.layers
with servers.scope():
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Conv2D(64, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.3),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ])  # fmt: skip
    rate = options.learning_rate * servers.num_replicas_in_sync
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])

started = time.perf_counter()
history = model.fit(data, epochs=options.epochs, verbose=0).history
seconds = time.perf_counter() - started
hvd.barrier()  # in asynchronous training one worker is done before the other:
servers.pull(model)  # now the servers have all updates

if boss:
    for epoch, (loss, right) in enumerate(zip(history["loss"], history["accuracy"], strict=True)):
        print(f"epoch {epoch + 1:2d}  loss {loss:.4f}  accuracy {right:.4f}")
    for number, one in enumerate(servers.counters(model)):
        print(
            f"server {number}: {one['bytes']:,} bytes of parameters, {one['pushes']} pushes, {one['updates']} updates, "
            f"greatest staleness {one['greatest_staleness']}"
        )
    found = np.argmax(np.asarray(model(x_test, training=False)), axis=1)
    mode = "asynchronous" if options.asynchronous else "synchronous"
    print(f"test accuracy {np.mean(found == y_test):.4f}; {mode}, {hvd.size()} worker(s), {seconds:.1f} s")
