"""Settings that cannot work, and failures on one rank: every rank gets an error that names rank and cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator
from tests.estimator import distributed_models as models

v1 = tf.compat.v1
pytestmark = pytest.mark.np(2, 3, plain=False)


def raised(function: Callable[[], Any]) -> list[BaseException]:
    """Return what the function raised on each rank; every rank must have raised."""
    mine: Exception | None = None
    try:
        function()
    except Exception as error:
        mine = error
    said = hvd.allgather_object((type(mine).__name__, str(mine)))
    assert mine is not None, f"nothing was raised here, and {said} elsewhere"
    return said


def run(folder: Path | None, train_input: Any = models.sharded_input, max_steps: int | None = 4, **params: Any) -> Any:
    train, evaluate = models.specs(train_input, max_steps)
    return estimator.train_and_evaluate(models.make(folder, **params), train, evaluate)


def test_different_max_steps(world: Any, folder: Path) -> None:
    steps = 4 + (world.rank() == 1)
    for kind, text in raised(lambda: run(folder, max_steps=steps)):
        assert kind == "ConfigurationError"
        assert "max_steps" in text
        assert "4 on rank 0, 5 on rank 1" in text


@pytest.mark.parametrize("on_rank_0", [False, True])
def test_model_dir_on_other_ranks(world: Any, folder: Path, tmp_path: Path, on_rank_0: bool) -> None:
    given = tmp_path / "mine" if world.rank() == 1 else folder if on_rank_0 else None
    for kind, text in raised(lambda: run(given)):
        assert kind == "ConfigurationError"
        assert text.startswith("Rank 1 was given model_dir=")
        assert f"rank 0 {str(folder)!r}" in text if on_rank_0 else "rank 0 none" in text
    assert not (tmp_path / "mine" / "checkpoint").exists()


def test_an_input_fn_that_returns_nothing_on_one_rank(world: Any, folder: Path) -> None:
    def nothing(input_context: Any) -> Any:
        return models.sharded_input(input_context) if world.rank() != 1 else None

    said = raised(lambda: run(folder, nothing))
    assert "A rank failed" in said[0][1]
    assert "rank 1: failed: " in said[0][1]
    assert said[0][0] == "MismatchError"


def test_no_batch_on_one_rank(world: Any, folder: Path) -> None:
    def empty(input_context: Any) -> Any:
        data = models.sharded_input(input_context)
        return data.take(0) if world.rank() == 1 else data

    for kind, text in raised(lambda: run(folder, empty)):
        assert kind == "ConfigurationError"
        assert "gave no batch on rank(s) 1" in text


def test_an_input_fn_that_raises_on_one_rank(world: Any, folder: Path) -> None:
    def broken(input_context: Any) -> Any:
        if world.rank() == 1:
            raise OSError("no such file: part-1.tfrecord")
        return models.sharded_input(input_context)

    for kind, text in raised(lambda: run(folder, broken)):
        assert kind in ("MismatchError", "OSError")
        assert "part-1.tfrecord" in text
        assert kind == "OSError" or "rank 1: failed: OSError" in text


def save(folder: Path, **shapes: list[int]) -> None:
    """Write a checkpoint of step 0 with these variables of the model."""
    folder.mkdir()
    with tf.Graph().as_default():
        for name, shape in shapes.items():
            v1.get_variable(f"linear/{name}", shape)
        v1.train.get_or_create_global_step()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, str(folder / "model.ckpt"), global_step=0)


def plain_sgd() -> Any:
    return v1.train.GradientDescentOptimizer(0.1)


def test_a_checkpoint_from_another_graph(world: Any, folder: Path) -> None:
    if world.rank() == 0:
        save(folder, another=[2], bias=[1])
    for rank, (kind, text) in enumerate(raised(lambda: run(folder, optimizer=plain_sgd))):
        assert f"The newest checkpoint in {folder} is of another model: Key linear/kernel not found" in text
        assert kind == ("CheckpointError" if rank == 0 else "MismatchError")
        assert rank == 0 or "rank 0: failed: CheckpointError" in text


def test_a_checkpoint_with_other_shapes(world: Any, folder: Path) -> None:
    """TensorFlow restores it without a word."""
    if world.rank() == 0:
        save(folder, kernel=[2], bias=[1])
    for rank, (kind, text) in enumerate(raised(lambda: run(folder, optimizer=plain_sgd))):
        assert "linear/kernel:0 has shape (2,) there and (3, 1) here" in text
        assert kind == ("CheckpointError" if rank == 0 else "MismatchError")
        assert rank == 0 or "rank 0: failed: CheckpointError" in text


def test_an_evaluation_that_fails_on_rank_0(world: Any, folder: Path) -> None:
    """The next start goes on from the last whole checkpoint."""

    def broken() -> Any:
        raise OSError("the evaluation data are gone")

    train, evaluate = models.specs()
    bad = evaluate._replace(input_fn=broken)
    for rank, (kind, text) in enumerate(raised(lambda: estimator.train_and_evaluate(models.make(folder), train, bad))):
        assert "the evaluation data are gone" in text
        assert kind == ("OSError" if rank == 0 else "CollectiveError")
        assert rank == 0 or text.startswith("Rank 0 failed in the evaluation")
    metrics, _ = estimator.train_and_evaluate(models.make(folder), train, evaluate)
    assert metrics is not None
    assert metrics["global_step"] == models.STEPS


@pytest.mark.parametrize("failure", [StopIteration("no more"), tf.errors.UnavailableError(None, None, "gone")], ids=str)
def test_an_evaluation_that_fails_like_a_session(world: Any, folder: Path, failure: Exception) -> None:
    """To a training session these would mean the end of the data, or that it is to begin anew."""

    def broken() -> Any:
        raise failure

    train, evaluate = models.specs()
    bad = evaluate._replace(input_fn=broken)
    for kind, text in raised(lambda: estimator.train_and_evaluate(models.make(folder), train, bad)):
        assert kind == "CollectiveError"
        assert str(failure) in text or "gone" in text


def test_not_a_number_on_one_rank(world: Any, folder: Path) -> None:
    def bad(input_context: Any) -> Any:
        data = models.sharded_input(input_context)
        factor = float("nan") if world.rank() == 1 else 1.0
        return data.map(lambda x, y: (x, y * factor))

    for rank, (kind, text) in enumerate(raised(lambda: run(folder, bad))):
        assert "NaN loss during training" in text
        assert rank == 1 or (kind == "MismatchError" and "rank 1: failed: NanLossDuringTrainingError" in text)


def test_a_hook_that_raises_on_one_rank(world: Any, folder: Path) -> None:
    class Broken(v1.train.SessionRunHook):  # type: ignore[name-defined]
        def after_run(self, run_context: Any, run_values: Any) -> None:
            if world.rank() == 1:
                raise RuntimeError("the hook is broken")

    train, evaluate = models.specs(hooks=[Broken()])
    for rank, (kind, text) in enumerate(
        raised(lambda: estimator.train_and_evaluate(models.make(folder), train, evaluate))
    ):
        assert "the hook is broken" in text
        assert kind == ("RuntimeError" if rank == 1 else "MismatchError")


def test_models_that_differ(world: Any, folder: Path) -> None:
    def other(features: Any, labels: Any, mode: str, params: Any) -> Any:
        if world.rank() == 1:
            v1.get_variable("one_more", [3])
        return models.model_fn(features, labels, mode, params)

    config = estimator.RunConfig(save_checkpoints_steps=2)
    mine = estimator.Estimator(other, model_dir=str(folder), config=config, params={})
    for kind, text in raised(lambda: estimator.train_and_evaluate(mine, *models.specs())):
        assert kind == "MismatchError"
        assert "one_more" in text


@pytest.mark.parametrize(
    ("what", "message"),
    [("estimator", "an Estimator"), ("train_spec", "a TrainSpec"), ("eval_spec", "an EvalSpec")],
)
def test_wrong_types_on_one_rank(world: Any, folder: Path, what: str, message: str) -> None:
    train, evaluate = models.specs()
    given = {"estimator": models.make(folder), "train_spec": train, "eval_spec": evaluate}
    if world.rank() == 1:
        given[what] = "nothing of the kind"
    for kind, text in raised(lambda: estimator.train_and_evaluate(**given)):
        assert kind == "ConfigurationError"
        assert text == f"Rank 1: train_and_evaluate takes {message} as {what}. Received: 'nothing of the kind'."


def test_unknown_evaluation(world: Any, folder: Path) -> None:
    with pytest.raises(hvd.ConfigurationError, match="'rank 0' or 'sharded'"):
        estimator.train_and_evaluate(models.make(folder), *models.specs(), evaluation="everywhere")


def test_shard_input_fn_needs_a_dataset(world: Any) -> None:
    def arrays() -> Any:
        return {"x": np.zeros((2, 3))}, np.zeros((2, 1))

    with pytest.raises(hvd.ConfigurationError, match=r"dict|tuple"):
        estimator.shard_input_fn(arrays)()


@pytest.mark.parametrize("arguments", [(0.0, 3), (-1.0, 3), (0.1, -1), (0.1, 1.5)])
def test_warmup_hook(world: Any, arguments: Any) -> None:
    with tf.Graph().as_default(), pytest.raises(hvd.ConfigurationError):
        estimator.LearningRateWarmupHook(*arguments)
