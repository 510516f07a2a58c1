"""Measures training speed, in images a second, of any model of keras.applications on random data.

    hvdxrun -np 2 python examples/synthetic_benchmark.py --model MobileNetV2 --batch-size 8
    python examples/synthetic_benchmark.py --model ResNet50

The options, defaults and figures are those of Horovod's tensorflow2_synthetic_benchmark.py, so that results compare.
Runs on Keras 3 and on TensorFlow 2.15 with Keras 2.15.
"""

from __future__ import annotations

import argparse
import timeit

import _quiet  # noqa: F401  (first: it imports TensorFlow without its start-up lines)
import keras
import numpy as np
import tensorflow as tf

import hvdx as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="ResNet50", help="a model of keras.applications (default ResNet50)")
parser.add_argument("--batch-size", type=int, default=32, help="images a step of one rank (default 32)")
parser.add_argument("--image-size", type=int, default=224, help="height and width of the images (default 224)")
parser.add_argument("--num-warmup-batches", type=int, default=10, help="steps that are not measured (default 10)")
parser.add_argument("--num-batches-per-iter", type=int, default=10, help="steps in one measurement (default 10)")
parser.add_argument("--num-iters", type=int, default=10, help="measurements (default 10)")
parser.add_argument("--fp16-allreduce", action="store_true", help="let gradients travel in 16 bits")
parser.add_argument("--no-cuda", action="store_true", help="use no GPU")
options = parser.parse_args()


def log(text: str) -> None:
    """Print on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if options.no_cuda:
    tf.config.set_visible_devices([], "GPU")
elif gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)
device = "GPU" if gpus and not options.no_cuda else "CPU"

make_model = getattr(keras.applications, options.model, None)
if not callable(make_model):
    names = [name for name in dir(keras.applications) if callable(getattr(keras.applications, name))]
    parser.error(f"keras.applications has no model {options.model!r}. It has: {', '.join(names)}")
shape = (options.image_size, options.image_size, 3)
model = make_model(weights=None, input_shape=shape)
loss_of = keras.losses.SparseCategoricalCrossentropy()
optimizer = keras.optimizers.SGD(0.01)
compression = hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none
# Every rank draws its own, as it would read its own images.
random = np.random.default_rng(hvd.rank())
data = tf.constant(random.uniform(size=(options.batch_size, *shape)), tf.float32)
target = tf.constant(random.integers(0, 1000, options.batch_size), tf.int64)
hvd.broadcast_variables(model.variables, root_rank=0)


@tf.function
def train_step() -> None:
    """Make one update."""
    with tf.GradientTape() as tape:
        loss = loss_of(target, model(data, training=True))
    gradients = hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


log(f"Model: {options.model}")
log(f"Batch size: {options.batch_size}")
log(f"Number of {device}s: {hvd.size()}")
log("Running warmup...")
timeit.timeit(train_step, number=options.num_warmup_batches)
log("Running benchmark...")
speeds = []
for iteration in range(options.num_iters):
    seconds = timeit.timeit(train_step, number=options.num_batches_per_iter)
    speeds.append(options.batch_size * options.num_batches_per_iter / seconds)
    log(f"Iter #{iteration}: {speeds[-1]:.1f} img/sec per {device}")
mean, spread = np.mean(speeds), 1.96 * np.std(speeds)
log(f"Img/sec per {device}: {mean:.1f} +-{spread:.1f}")
log(f"Total img/sec on {hvd.size()} {device}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
