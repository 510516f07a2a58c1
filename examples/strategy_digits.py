"""The digits of keras_digits.py in the way of tf.distribute: the strategy is made first, and the rest is plain Keras.

    hvdxrun -np 2 python examples/strategy_digits.py
    python examples/strategy_digits.py --mode one_device
    python examples/strategy_digits.py --mode central_storage

Other modes have programs of their own: mirrored_digits.py, parameter_server_digits.py. Runs on Keras 3 and on
TensorFlow 2.15 with Keras 2.15.
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
parser.add_argument("--mode", default="multi_worker", help="multi_worker (default), one_device, central_storage or tpu")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=32, help="samples a step of one replica (default 32)")
parser.add_argument("--learning-rate", type=float, default=1e-3, help="for one replica; multiplied by their number")
parser.add_argument("--checkpoints", default="", help="file name for ModelCheckpoint, such as out/digits.keras")


def main() -> None:
    """Train, test, and say what came out."""
    options = parser.parse_args()
    made = strategy(options.mode)
    boss = hvd.rank() == 0
    if boss:
        print(made.describe(), flush=True)
    keras.utils.set_random_seed(1)
    x, y, x_test, y_test = load()
    # The batch is that of all replicas; the strategy cuts it, and every rank makes the same dataset.
    batch = options.batch_size * made.num_replicas_in_sync
    train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(batch, drop_remainder=True)
    test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(batch)
    with made.scope():
        model = build_model()
        optimizer = keras.optimizers.Adam(options.learning_rate * made.num_replicas_in_sync)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [keras.callbacks.ModelCheckpoint(options.checkpoints)] if options.checkpoints else []
    started = time.perf_counter()
    # shuffle=False: the dataset has done that, and Keras would warn that it does not.
    history = model.fit(train, epochs=options.epochs, callbacks=callbacks, verbose=0, shuffle=False).history
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
