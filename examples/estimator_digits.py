"""The digits of keras_digits.py with an Estimator: a model_fn, checkpoints, an export; on as many ranks as you start.

    hvdxrun -np 2 python examples/estimator_digits.py
    python examples/estimator_digits.py

Interrupt it and start it again: it goes on from its last checkpoint. Runs on TensorFlow 2.15, where `hvdx.estimator` is
tf.estimator's, and on newer ones, where hvdx brings an Estimator itself.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any

import _quiet  # noqa: F401  (first: it imports TensorFlow without its start-up lines)
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdx as hvd
from hvdx import estimator

v1 = tf.compat.v1
v1.logging.set_verbosity(v1.logging.ERROR)  # TensorFlow would say of every function used here that it is old
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model-dir", default="demo-output/estimator_digits", help="folder of checkpoints and export")
parser.add_argument("--max-steps", type=int, default=400, help="updates in all, over all starts (default 400)")
parser.add_argument("--save-steps", type=int, default=100, help="updates from one checkpoint to the next")
parser.add_argument("--batch-size", type=int, default=64, help="samples a step of all ranks together (default 64)")
parser.add_argument("--learning-rate", type=float, default=2e-3)
parser.add_argument("--evaluation", choices=["rank 0", "sharded"], default="rank 0", help="who evaluates")
parser.add_argument("--in-order", action="store_true", help="do not shuffle: any number of ranks trains the same")
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
x, x_test, y, y_test = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)


def train_input(input_context: Any) -> tf.data.Dataset:
    """Return batches of this rank's part of the training digits, without end: divided first, then shuffled."""
    data = tf.data.Dataset.from_tensor_slices(({"image": x}, y))
    data = data.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    if not options.in_order:
        data = data.shuffle(len(x))
    return data.repeat().batch(options.batch_size // input_context.num_input_pipelines)


def test_input() -> tf.data.Dataset:
    """Return the test digits; with sharded evaluation, hvdx divides the batches between the ranks."""
    return tf.data.Dataset.from_tensor_slices(({"image": x_test}, y_test)).batch(60)


def serving_input() -> Any:
    """Return what a served model is given."""
    image = v1.placeholder(tf.float32, [None, 8, 8, 1], name="image")
    return estimator.export.ServingInputReceiver({"image": image}, {"image": image})


def layer(x: tf.Tensor, name: str, shape: list[int], seed: int) -> tf.Tensor:
    """Return a convolution of the images, or a dense layer of the vectors, without the activation."""
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", shape, initializer=v1.glorot_uniform_initializer(seed=seed))
        bias = v1.get_variable("bias", shape[-1:], initializer=v1.zeros_initializer())
    return (tf.nn.conv2d(x, kernel, 1, "SAME") if len(shape) == 4 else tf.matmul(x, kernel)) + bias


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str) -> Any:
    """Build a network of two convolutions and two dense layers."""
    hidden = tf.nn.relu(layer(features["image"], "conv1", [3, 3, 1, 32], seed=1))
    hidden = tf.nn.relu(layer(hidden, "conv2", [3, 3, 32, 64], seed=2))
    hidden = tf.reshape(tf.nn.max_pool2d(hidden, 2, 2, "VALID"), [-1, 4 * 4 * 64])
    hidden = tf.nn.relu(layer(hidden, "dense1", [4 * 4 * 64, 64], seed=3))
    logits = layer(hidden, "dense2", [64, 10], seed=4)
    digit = tf.argmax(logits, axis=1)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"digit": digit, "probabilities": tf.nn.softmax(logits)})
    loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == estimator.ModeKeys.EVAL:
        metrics = {"accuracy": v1.metrics.accuracy(labels, digit)}
        return estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    # From a tenth of the rate to the full one in 50 steps. The batch is that of all ranks: the rate need not grow.
    warmup = estimator.LearningRateWarmupHook(options.learning_rate, warmup_steps=50, size=10)
    optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(warmup.learning_rate))
    train_op = optimizer.minimize(loss, global_step=v1.train.get_global_step())
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[warmup])


class Weights(v1.train.SessionRunHook):
    """Keeps the hash of this rank's weights at the end of the training: equal only where every bit is."""

    def begin(self) -> None:
        self.variables = v1.trainable_variables()
        self.count = sum(variable.shape.num_elements() for variable in self.variables)

    def end(self, session: v1.Session) -> None:
        self.hash = hashlib.sha256(b"".join(value.tobytes() for value in session.run(self.variables))).hexdigest()[:12]


def main() -> None:
    """Train, test, and write what came out."""
    hvd.init()
    boss, ranks = hvd.rank() == 0, f"{hvd.size()} rank{'s' if hvd.size() > 1 else ''}"
    config = estimator.RunConfig(
        save_checkpoints_steps=options.save_steps, keep_checkpoint_max=2, tf_random_seed=1, log_step_count_steps=None
    )
    digits = estimator.Estimator(model_fn, options.model_dir, config)  # rank 0 alone reads and writes the folder
    start = int(digits.get_variable_value("global_step")) if boss and digits.latest_checkpoint() else 0
    if boss:
        print(f"hvdx {hvd.__version__}, TensorFlow {tf.__version__}, {ranks}")
        print(f"{len(x):,} digits to learn from, {len(x_test)} to be tested on; from step {start}", flush=True)
    weights = Weights()
    train = estimator.TrainSpec(train_input, max_steps=options.max_steps, hooks=[weights])
    exporter = estimator.FinalExporter("digits", serving_input)
    test = estimator.EvalSpec(test_input, steps=None, exporters=[exporter], start_delay_secs=0, throttle_secs=0)
    started = time.perf_counter()
    metrics, exports = estimator.train_and_evaluate(digits, train, test, evaluation=options.evaluation)
    if metrics is None:
        if boss:
            print(f"finished already: {options.model_dir} holds step {start}, and --max-steps is {options.max_steps}")
        return
    hashes = hvd.allgather_object(weights.hash, name="hashes of the weights")
    if not boss:
        return
    same = "all ranks hold bit-identical weights" if len(set(hashes)) == 1 else "THE RANKS' WEIGHTS DIFFER"
    right = round(float(metrics["accuracy"]) * len(x_test))
    print(f"trained steps {start + 1} to {metrics['global_step']} in {time.perf_counter() - started:.1f} s")
    print(f"test accuracy {metrics['accuracy']:.4f} ({right} of {len(x_test)} digits), test loss {metrics['loss']:.4f}")
    print(f"{same}: {weights.count:,} numbers, {', '.join(hashes)}")
    print(f"wrote {tf.compat.as_str(exports[0])}")


if __name__ == "__main__":
    main()
