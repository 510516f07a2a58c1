"""`tf.compat.v1.layers` in a model_fn, where TensorFlow has them from tf_keras only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

pytest.importorskip("tf_keras")
PROGRAM = """
import sys
import numpy as np
import tensorflow as tf
import hvdx as hvd
from hvdx import estimator

v1 = tf.compat.v1
hvd.init()

def model_fn(features, labels, mode):
    hidden = v1.layers.dense(features, 4, activation=tf.nn.relu, kernel_initializer=v1.constant_initializer(0.5))
    loss = tf.reduce_mean(tf.square(v1.layers.dense(hidden, 1) - labels))
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.01))
    train_op = optimizer.minimize(loss, global_step=v1.train.get_global_step())
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

def input_fn():
    return tf.data.Dataset.from_tensor_slices((np.ones((8, 2), "float32"), np.ones((8, 1), "float32"))).batch(4)

model = estimator.Estimator(model_fn, model_dir=sys.argv[1]).train(input_fn)
print("trained", model.get_variable_names())
"""


def test_layers_with_tf_keras(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environ = dict(os.environ, TF_USE_LEGACY_KERAS="1", PYTHONPATH=path)
    command = [sys.executable, str(script), str(tmp_path / "model")]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "trained ['dense/bias', 'dense/kernel', 'dense_1/bias', 'dense_1/kernel', 'global_step']" in ended.stdout
