"""The Estimator examples as a user runs them: trained on several ranks and alone, interrupted, started again."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from hvdx.estimator import has_tf_estimator
from tests.examples.test_examples import EXAMPLES, accuracy, fingerprints, needs_scikit_learn, run
from tests.support.jobs import Job, processes_with, run_ranks

pytestmark = pytest.mark.timeout(300)
DIGITS, CENSUS = "estimator_digits.py", "estimator_census_style.py"


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return everything in the newest checkpoint."""
    reader = tf.train.load_checkpoint(str(folder))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_same(one: Path, other: Path, rtol: float, atol: float) -> None:
    expected, found = weights(one), weights(other)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol, atol, err_msg=name)


def saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint that is whole, or -1."""
    path = tf.train.latest_checkpoint(str(folder))
    return int(path.rsplit("-", 1)[1]) if path else -1


def interrupted(folder: Path) -> Job:
    """Start the digits on two ranks, and kill one of them by SIGKILL once a checkpoint of step 20 is there."""
    jobs: list[Job] = []
    command = [str(EXAMPLES / DIGITS), "--model-dir", str(folder), "--max-steps", "100000", "--save-steps", "20"]
    thread = threading.Thread(target=lambda: jobs.append(run_ranks(2, command, limit=120)))
    thread.start()
    limit = time.monotonic() + 100
    while saved_step(folder) < 20:
        assert time.monotonic() < limit
        assert thread.is_alive(), jobs
        time.sleep(0.05)
    ranks = [pid for pid in processes_with(str(folder)) if is_rank(pid)]
    assert len(ranks) == 2
    os.kill(max(ranks), signal.SIGKILL)
    thread.join(timeout=60)
    assert jobs, "the job must end when a rank is killed"
    return jobs[0]


def is_rank(pid: int) -> bool:
    """Return whether it is a process of the example itself, not of the launchers before it."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[1:2] == [str(EXAMPLES / DIGITS).encode()]


@needs_scikit_learn
def test_digits_interrupted_resumed_and_finished(tmp_path: Path) -> None:
    """A killed rank ends the job; the next start goes on from the last checkpoint, and one more finds nothing to do."""
    folder = tmp_path / "model"
    job = interrupted(folder)
    assert job.code != 0
    assert "trained steps" not in job.output
    step = saved_step(folder)
    assert step >= 20

    most = max(300, step + 20)
    options = ("--model-dir", str(folder), "--max-steps", str(most), "--save-steps", "100")
    output = run(2, DIGITS, *options)
    assert f"from step {step}\n" in output
    assert f"trained steps {step + 1} to {most} in" in output
    assert accuracy(output) >= 0.95
    fingerprints(output, 2)
    served = tf.saved_model.load(re.search(rf"wrote ({re.escape(str(folder))}/export/digits/\d+)", output)[1])
    probabilities = served.signatures["serving_default"](image=tf.zeros([3, 8, 8, 1]))["probabilities"]
    np.testing.assert_allclose(np.sum(probabilities, -1), 1, rtol=1e-5)

    again = run(1, DIGITS, *options)
    assert f"finished already: {folder} holds step {most}" in again
    assert "trained" not in again


@needs_scikit_learn
def test_digits_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    """The batch is that of all ranks, so in order the same digits make each update."""
    options = ("--in-order", "--max-steps", "12", "--evaluation", "sharded")
    alone = run(1, DIGITS, *options, "--model-dir", str(tmp_path / "alone"))
    both = run(2, DIGITS, *options, "--model-dir", str(tmp_path / "both"))
    fingerprints(alone, 1)
    fingerprints(both, 2)
    closing = re.compile(r"test accuracy .*")
    assert closing.search(both)[0] == closing.search(alone)[0]
    assert_same(tmp_path / "alone", tmp_path / "both", rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not has_tf_estimator(), reason="canned Estimators are in TensorFlow 2.15 only")
def test_census_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    """The same seed, the same batches; and the evaluation of both ranks' parts is that of one on everything."""
    alone, both = tmp_path / "alone", tmp_path / "both"
    outputs = [run(n, CENSUS, "--model-dir", str(f), "--max-steps", "150") for n, f in ((1, alone), (2, both))]
    for ranks, output in enumerate(outputs, 1):
        fingerprints(output, ranks)
        assert accuracy(output) >= 0.86
        assert float(re.search(r"auc (0\.\d+)", output)[1]) >= 0.92
    assert_same(alone, both, rtol=1e-2, atol=1e-3)


@pytest.mark.skipif(has_tf_estimator(), reason="TensorFlow 2.15 has canned Estimators")
def test_census_says_why_it_cannot_run_here() -> None:
    job = run_ranks(1, [str(EXAMPLES / CENSUS)], limit=120)
    assert job.code == 1
    assert (
        "DNNLinearCombinedClassifier is left out where TensorFlow has no tf.estimator: write a model_fn" in job.output
    )
    assert "Traceback" not in job.output
