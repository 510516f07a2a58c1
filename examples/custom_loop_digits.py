"""The digits of keras_digits.py with a loop of your own: GradientTape, DistributedGradientTape and tf.function.

    hvdxrun -np 2 python examples/custom_loop_digits.py
    python examples/custom_loop_digits.py

Runs on Keras 3 and on TensorFlow 2.15 with Keras 2.15.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import _quiet  # noqa: F401  (first: it imports TensorFlow without its start-up lines)
import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdx as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=32, help="samples a step of one rank (default 32)")
parser.add_argument("--learning-rate", type=float, default=1e-3, help="for one rank; multiplied by the number of ranks")
options = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(1 + hvd.rank())  # the weights differ until rank 0's are broadcast
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
x, x_test, y, y_test = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
train = hvd.shard((x, y), options.batch_size)
test = hvd.shard((x_test, y_test), 60, shuffle=False)

layers = keras.layers
model = keras.Sequential([
    keras.Input((8, 8, 1)),
    layers.Conv2D(32, 3, padding="same", activation="relu"),
    layers.Conv2D(64, 3, padding="same", activation="relu"),
    layers.MaxPooling2D(),
    layers.Flatten(),
    layers.Dropout(0.3),
    layers.Dense(64, activation="relu"),
    layers.Dense(10),
])  # fmt: skip
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(options.learning_rate * hvd.size())
optimizer.build(model.trainable_variables)  # so that its variables exist and can be broadcast, before the first step
hvd.broadcast_variables(model.variables, root_rank=0)
variables = optimizer.variables if isinstance(optimizer.variables, list) else optimizer.variables()
hvd.broadcast_variables(variables, root_rank=0)


@tf.function
def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Make one update from the gradients of all ranks; return this rank's loss."""
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def count_right(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return how many digits of a batch the model names right."""
    found = tf.argmax(model(x, training=False), axis=1, output_type=y.dtype)
    return tf.reduce_sum(tf.cast(found == y, tf.int64))


started = time.perf_counter()
for epoch in range(options.epochs):
    losses = [train_step(*batch) for batch in train]
    loss = hvd.allreduce(tf.reduce_mean(losses), name="loss of the epoch")
    right = hvd.allreduce(sum(count_right(*batch) for batch in test), op=hvd.Sum, name="digits named right")
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1:2d}  loss {loss:.4f}  test accuracy {int(right) / len(x_test):.4f}", flush=True)

digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()[:12]
prints = hvd.allgather_object(digest, name="hashes of the weights")
if hvd.rank() == 0:
    same = "all ranks hold bit-identical weights" if len(set(prints)) == 1 else "THE RANKS' WEIGHTS DIFFER"
    print(
        f"test accuracy {int(right) / len(x_test):.4f} on {hvd.size()} rank(s); {time.perf_counter() - started:.1f} s"
    )
    print(f"{same}: {model.count_params():,} numbers, {', '.join(prints)}")
