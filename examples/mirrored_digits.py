"""The digits of keras_digits.py on all devices of a process: its GPUs, or logical CPUs where there are none.

    python examples/mirrored_digits.py
    hvdxrun -np 2 python examples/mirrored_digits.py

Under hvdxrun every rank brings its devices, and all train together. Runs on Keras 3 and on TensorFlow 2.15 with Keras
2.15.
"""

from __future__ import annotations

import argparse
import time

import _quiet  # noqa: F401  (first: it imports TensorFlow without its start-up lines)
import keras
import tensorflow as tf
from keras_digits import build_model, fingerprint, load

import hvdx as hvd
from hvdx.distribute import strategy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=32, help="samples a step of one device (default 32)")
parser.add_argument("--learning-rate", type=float, default=1e-3, help="for one device; multiplied by their number")
parser.add_argument("--cpus", type=int, default=2, help="logical CPUs where there is no GPU (default 2)")
parser.add_argument(
    "--communicator", default="hvdx", help='"hvdx", "hvdx-ring", "hvdx-hierarchical", "hvdx-nccl", or "tensorflow"'
)


def main() -> None:
    """Train, test, and say what came out."""
    options = parser.parse_args()
    if not tf.config.list_physical_devices("GPU"):
        # Before TensorFlow starts: one CPU stands for several devices, as one would try a program without GPUs.
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * options.cpus)
    mirrored = strategy("mirrored", communicator=options.communicator)
    boss = hvd.rank() == 0
    if boss:
        print(mirrored.describe(), flush=True)

    keras.utils.set_random_seed(1)
    x, y, x_test, y_test = load()
    # The batch is that of all devices, which the strategy cuts among them.
    batch = options.batch_size * mirrored.num_replicas_in_sync
    train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(batch, drop_remainder=True)
    test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(batch)
    with mirrored.scope():
        model = build_model()
        optimizer = keras.optimizers.Adam(options.learning_rate * mirrored.num_replicas_in_sync)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    started = time.perf_counter()
    # shuffle=False: the dataset has done that, and Keras would warn that it does not.
    history = model.fit(train, epochs=options.epochs, verbose=0, shuffle=False).history
    seconds = time.perf_counter() - started

    accuracy = model.evaluate(test, verbose=0, return_dict=True)["accuracy"]
    prints = hvd.allgather_object(fingerprint(model))
    if boss:
        for epoch, loss in enumerate(history["loss"]):
            print(f"epoch {epoch + 1:2d}  loss {loss:.4f}  accuracy {history['accuracy'][epoch]:.4f}")
        same = "all ranks hold bit-identical weights" if len(set(prints)) == 1 else "THE RANKS' WEIGHTS DIFFER"
        print(f"{same}: {model.count_params():,} numbers, {', '.join(prints)}")
        print(f"test accuracy {accuracy:.4f} of {len(x_test)} digits; trained for {seconds:.1f} s")


if __name__ == "__main__":
    main()
