"""Trains a small convolutional network on real handwritten digits with `model.fit`, on as many ranks as you start.

    hvdxrun -np 2 python examples/keras_digits.py
    python examples/keras_digits.py

The lines with `hvd.` are all that several ranks need. Runs on Keras 3 and on TensorFlow 2.15 with Keras 2.15.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import time
from pathlib import Path

import _quiet  # noqa: F401  (first: it imports TensorFlow without its start-up lines)
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdx as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=32, help="samples a step of one rank (default 32)")
parser.add_argument("--learning-rate", type=float, default=1e-3, help="for one rank; multiplied by the number of ranks")
parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for what is written")
parser.add_argument("--resume", action="store_true", help="go on after the last checkpoint in the output folder")


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training and test images (n, 8, 8, 1) from 0 to 1 with their labels; the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    return x, y, x_test, y_test


def build_model() -> keras.Model:
    """Return a network of two convolutions and two dense layers."""
    layers = keras.layers
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Conv2D(64, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.3),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ])  # fmt: skip


def fingerprint(model: keras.Model) -> str:
    """Return a hash of all weights: equal only where every bit is."""
    return hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()[:12]


def draw(epochs: list[int], history: dict[str, list[float]], title: str, path: Path) -> None:
    """Write the training curves as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, name in zip(axes, ("loss", "accuracy"), strict=True):
        axis.plot(epochs, history[name], "o-", markersize=4, color="#8da0cb", label="training (with dropout)")
        axis.plot(epochs, history["val_" + name], "o-", markersize=4, color="#d95f02", label="test")
        last = history["val_" + name][-1]
        axis.annotate(
            f"{last:.3f}", (epochs[-1], last), (6, 0), textcoords="offset points", va="center", color="#d95f02"
        )
        axis.set(title=name, xlabel="epoch")
        axis.set_yscale("log" if name == "loss" else "linear")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, test, and write what came out."""
    options = parser.parse_args()
    hvd.init()
    boss, ranks = hvd.rank() == 0, f"{hvd.size()} rank{'s' if hvd.size() > 1 else ''}"
    keras.utils.set_random_seed(1 + hvd.rank())  # the weights differ until rank 0's are broadcast
    x, y, x_test, y_test = load()
    if boss:
        print(f"hvdx {hvd.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}, {ranks}")
        print(f"{len(x):,} handwritten digits to learn from, {len(x_test)} to be tested on", flush=True)
    checkpoints = options.output / "checkpoints"
    if boss and not options.resume:
        shutil.rmtree(checkpoints, ignore_errors=True)
    train = hvd.shard((x, y), options.batch_size)
    test = hvd.shard((x_test, y_test), 60, shuffle=False)

    model = build_model()
    rate = options.learning_rate * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(rate))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3),
        hvd.callbacks.LearningRateScheduleCallback(rate, lambda epoch: 0.9 ** (epoch - 3), start_epoch=3),
        hvd.callbacks.ProgressCallback(),
        hvd.callbacks.CheckpointCallback(checkpoints, keep=2),
    ]
    started = time.perf_counter()
    # shuffle=False: hvd.shard has done that, and Keras would warn that it does not.
    fitted = model.fit(
        train, epochs=options.epochs, validation_data=test, callbacks=callbacks, verbose=0, shuffle=False
    )
    seconds = time.perf_counter() - started

    result = model.evaluate(test, callbacks=[hvd.callbacks.MetricAverageCallback()], verbose=0, return_dict=True)
    prints = hvd.allgather_object(fingerprint(model))
    if not boss:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    model.save(options.output / "digits.keras")
    title = f"Handwritten digits, trained on {ranks}: {result['accuracy']:.1%} of the test digits right"
    if fitted.epoch:
        draw([epoch + 1 for epoch in fitted.epoch], fitted.history, title, options.output / "training.png")
    same = "all ranks hold bit-identical weights" if len(set(prints)) == 1 else "THE RANKS' WEIGHTS DIFFER"
    right = round(result["accuracy"] * len(x_test))
    print(f"test accuracy {result['accuracy']:.4f} ({right} of {len(x_test)} digits); trained for {seconds:.1f} s")
    print(f"{same}: {model.count_params():,} numbers, {', '.join(prints)}")
    print(f"wrote {options.output / 'digits.keras'} and {options.output / 'training.png'}")


if __name__ == "__main__":
    main()
