"""A wide and deep network on a table of people: a canned Estimator with feature columns, on TensorFlow 2.15.

    hvdxrun -np 2 python examples/estimator_census_style.py
    python examples/estimator_census_style.py

The table is made up, in the style of the census-income data: who earns more than 50,000 a year? Newer TensorFlows have
no canned Estimators; estimator_digits.py shows what runs there.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any

import _quiet  # noqa: F401  (first: it imports TensorFlow without its start-up lines)
import numpy as np
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator

v1 = tf.compat.v1
v1.logging.set_verbosity(v1.logging.ERROR)  # TensorFlow would say of every function used here that it is old
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model-dir", default="demo-output/estimator_census_style", help="folder of checkpoints")
parser.add_argument("--max-steps", type=int, default=400, help="updates in all, over all starts (default 400)")
parser.add_argument("--batch-size", type=int, default=128, help="people a step of all ranks together (default 128)")
options = parser.parse_args()

EDUCATION = ["school", "high school", "college", "bachelor", "master", "doctorate"]
OCCUPATION = ["clerk", "craft", "farming", "manager", "nurse", "sales", "service", "teacher", "technician", "transport"]


def people(count: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return columns of so many people, and 1 for each who earns more than 50,000; the same on every rank."""
    random = np.random.default_rng(seed)
    age = random.integers(17, 80, count)
    hours = np.clip(random.normal(40, 11, count), 5, 90)
    education = random.choice(len(EDUCATION), count, p=[0.15, 0.3, 0.25, 0.18, 0.09, 0.03])
    occupation = random.integers(0, len(OCCUPATION), count)
    pay = np.array([-0.6, 0.2, -1.0, 1.4, 0.1, 0.4, -1.2, 0.0, 0.7, -0.2])[occupation]
    degree_pays = np.array([0.1, 0.3, 0.0, 1.2, 0.6, 0.5, 0.0, 0.3, 1.0, 0.1])[occupation] * (education - 1.5)
    score = -0.7 + pay + degree_pays + 0.5 * (education - 1.5) + 0.06 * (hours - 40) - 0.0025 * (age - 50) ** 2
    earns = random.random(count) < 1 / (1 + np.exp(-1.8 * score))
    columns = {"age": age.astype("float32"), "hours": hours.astype("float32")}
    columns |= {"education": np.array(EDUCATION)[education], "occupation": np.array(OCCUPATION)[occupation]}
    return columns, earns.astype("int64")


def train_input(input_context: Any) -> tf.data.Dataset:
    """Return batches of this rank's part, without end. The people come in no order, so they need no shuffling."""
    data = tf.data.Dataset.from_tensor_slices(people(12_800, seed=1))
    data = data.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return data.repeat().batch(options.batch_size // input_context.num_input_pipelines)


def test_input() -> tf.data.Dataset:
    """Return other people; hvdx divides the batches between the ranks, and the metrics are those of all of them."""
    return tf.data.Dataset.from_tensor_slices(people(4_000, seed=2)).batch(250)


def make_classifier(config: Any) -> Any:
    """Return a network of a wide (linear) and a deep part, each with its own optimizer."""
    column = tf.feature_column
    ages = column.bucketized_column(column.numeric_column("age"), [25, 30, 35, 40, 45, 50, 55, 60, 65])
    education = column.categorical_column_with_vocabulary_list("education", EDUCATION)
    occupation = column.categorical_column_with_hash_bucket("occupation", 50)
    crossed = column.crossed_column(["education", "occupation"], 500)
    legacy = tf.keras.optimizers.legacy  # the optimizers that canned Estimators take; a function makes one a graph
    return estimator.DNNLinearCombinedClassifier(
        model_dir=options.model_dir,
        linear_feature_columns=[ages, education, occupation, crossed],
        linear_optimizer=lambda: hvd.DistributedOptimizer(legacy.Ftrl(0.1)),
        dnn_feature_columns=[
            column.numeric_column("age", normalizer_fn=lambda value: (value - 48) / 18),
            column.numeric_column("hours", normalizer_fn=lambda value: (value - 40) / 11),
            column.indicator_column(education),
            column.embedding_column(occupation, 4),
        ],
        dnn_hidden_units=[32, 16],
        dnn_optimizer=lambda: hvd.DistributedOptimizer(legacy.Adam(0.01)),
        config=config,
    )


class Weights(estimator.SessionRunHook):
    """Keeps the hash of this rank's weights at the end of the training: equal only where every bit is."""

    def begin(self) -> None:
        self.variables = v1.trainable_variables()
        self.count = sum(variable.shape.num_elements() for variable in self.variables)

    def end(self, session: v1.Session) -> None:
        self.hash = hashlib.sha256(b"".join(value.tobytes() for value in session.run(self.variables))).hexdigest()[:12]


def main() -> None:
    """Train, test, and say what came out."""
    hvd.init()
    boss, ranks = hvd.rank() == 0, f"{hvd.size()} rank{'s' if hvd.size() > 1 else ''}"
    try:
        classifier = make_classifier(estimator.RunConfig(save_checkpoints_steps=200, tf_random_seed=1))
    except hvd.UnsupportedError as error:
        sys.exit(str(error) if boss else 1)
    if boss:
        print(f"hvdx {hvd.__version__}, TensorFlow {tf.__version__}, {ranks}", flush=True)
    weights = Weights()
    train = estimator.TrainSpec(train_input, max_steps=options.max_steps, hooks=[weights])
    test = estimator.EvalSpec(test_input, steps=None, start_delay_secs=0, throttle_secs=0)
    metrics, _ = estimator.train_and_evaluate(classifier, train, test, evaluation="sharded")
    if metrics is None:
        if boss:
            print(f"finished already: {options.model_dir} holds step {options.max_steps} or a later one")
        return
    hashes = hvd.allgather_object(weights.hash, name="hashes of the weights")
    if not boss:
        return
    same = "all ranks hold bit-identical weights" if len(set(hashes)) == 1 else "THE RANKS' WEIGHTS DIFFER"
    print(f"test accuracy {metrics['accuracy']:.4f} (always the same answer: {metrics['accuracy_baseline']:.4f})")
    print(f"auc {metrics['auc']:.4f}, test loss {metrics['average_loss']:.4f} after {metrics['global_step']} steps")
    print(f"{same}: {weights.count:,} numbers, {', '.join(hashes)}")


if __name__ == "__main__":
    main()
