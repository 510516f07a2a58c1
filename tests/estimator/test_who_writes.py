"""Hooks that write files: TensorFlow's own do on rank 0 alone, and a CheckpointSaverHook of the user's is rank 0's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator
from tests.estimator import distributed_models as models
from tests.estimator.watching import Watch

v1 = tf.compat.v1
pytestmark = pytest.mark.np(2, plain=False)


class Count(v1.train.SessionRunHook):  # type: ignore[name-defined]
    """A hook of the user's own, with a collective in it."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def begin(self) -> None:
        self._sum = hvd.allreduce(tf.constant(1.0), op=hvd.Sum)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.sums.append(float(run_context.session.run(self._sum)))


class OwnSummaries(v1.train.SummarySaverHook):  # type: ignore[name-defined]
    """A class of the user's runs on every rank, whatever it derives from."""


def saver(folder: Path) -> Any:
    return v1.train.CheckpointSaverHook(str(folder), save_steps=2)


def writers(folder: Path) -> list[Any]:
    """TensorFlow's own, each with a directory of its own."""
    summary = v1.summary.scalar("of_hook", tf.constant(1.0))
    return [
        v1.train.SummarySaverHook(save_steps=1, output_dir=str(folder / "summaries"), summary_op=summary),
        v1.train.StepCounterHook(every_n_steps=1, output_dir=str(folder / "counter")),
        v1.train.ProfilerHook(save_steps=2, output_dir=str(folder / "profile")),
    ]


def make(folder: Path, mine: Path, where: str, count: Count, **config: Any) -> Any:
    """Return an Estimator whose model_fn brings hooks: those that write between others, and a saver if it is to."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        spec = models.model_fn(features, labels, mode, params)
        if mode != estimator.ModeKeys.TRAIN:
            return spec
        summary = v1.summary.scalar("own", tf.constant(1.0))
        own = OwnSummaries(save_steps=1, output_dir=str(mine / "own"), summary_op=summary)
        chief = v1.train.StepCounterHook(every_n_steps=1, output_dir=str(mine / "chief"))
        chiefs = [chief, saver(folder)] if where == "training_chief_hooks" else [chief]
        hooks = [*writers(mine), count, own]
        if where == "training_hooks":
            hooks.insert(0, saver(folder))
        return spec._replace(training_hooks=tuple(hooks), training_chief_hooks=tuple(chiefs))

    settings = {"save_checkpoints_steps": None, "save_checkpoints_secs": None, **config}
    return estimator.Estimator(
        model_fn, model_dir=str(folder), config=estimator.RunConfig(**settings), params={"seed": 0}
    )


@pytest.mark.parametrize("where", ["train_spec", "training_hooks", "training_chief_hooks"])
def test_writing_hooks_and_a_saver_of_the_users(world: Any, folder: Path, tmp_path: Path, where: str) -> None:
    """Each rank gives the hooks directories of its own, so that one sees which rank wrote."""
    mine, count, watch, evaluations = tmp_path / "mine", Count(), Watch(), []

    class Evaluating(v1.train.SessionRunHook):  # type: ignore[name-defined]
        def begin(self) -> None:
            evaluations.append(tf.train.latest_checkpoint(folder))

    hooks = [saver(folder), watch] if where == "train_spec" else [watch]
    train, evaluate = models.specs(hooks=hooks)
    evaluate = evaluate._replace(hooks=(Evaluating(),))
    metrics, _ = estimator.train_and_evaluate(make(folder, mine, where, count), train, evaluate)
    assert count.sums == [world.size()] * models.STEPS
    assert metrics is not None
    assert metrics["global_step"] == models.STEPS
    # The constructor of a ProfilerHook, of whatever rank, already opens an event file: its profiles are counted.
    names = sorted(
        path.name for path in mine.iterdir() if list(path.glob("timeline*" if path.name == "profile" else "*"))
    )
    if world.rank():
        assert names == ["own"]
        assert evaluations == []
    else:
        assert names == ["chief", "counter", "own", "profile", "summaries"]
        assert evaluations == [str(folder / f"model.ckpt-{step}") for step in (2, 4, 6)]
    alone, expected = models.make(tmp_path / "alone", distributed=False), Watch()
    alone.train(models.whole_input, hooks=[expected], max_steps=models.STEPS)
    watch.check_same_as(expected.weights, world)


def test_writing_hooks_of_a_sharded_evaluation(world: Any, folder: Path, tmp_path: Path) -> None:
    train, evaluate = models.specs(max_steps=2)
    writing, own = tmp_path / "summaries", tmp_path / "own"

    def input_fn() -> Any:
        v1.summary.scalar("of_evaluation", tf.constant(1.0))
        return models.eval_input()

    hooks = [  # the name of a summary, for there is no graph yet
        kind(save_steps=1, output_dir=str(path), summary_op="of_evaluation:0")
        for kind, path in ((v1.train.SummarySaverHook, writing), (OwnSummaries, own))
    ]
    evaluate = evaluate._replace(input_fn=input_fn, hooks=tuple(hooks))
    estimator.train_and_evaluate(models.make(folder), train, evaluate, evaluation="sharded")
    assert own.is_dir()
    assert writing.is_dir() == (world.rank() == 0)


def failures(world: Any, run: Any) -> list[tuple[str, str]]:
    with pytest.raises(Exception) as caught:
        run()
    said: list[tuple[str, str]] = world.allgather_object((type(caught.value).__name__, str(caught.value)))
    return said


def test_nothing_is_saved(world: Any, folder: Path, tmp_path: Path) -> None:
    """Whether the model_fn saves is known on rank 0, which runs it; the others are told."""
    mine = make(folder, tmp_path / "mine", "nowhere", Count())
    for rank, (kind, text) in enumerate(failures(world, lambda: estimator.train_and_evaluate(mine, *models.specs()))):
        assert "Rank 0 saves no checkpoints" in text
        assert kind == ("MismatchError" if rank else "ConfigurationError")


def test_saved_somewhere_else(world: Any, folder: Path, tmp_path: Path) -> None:
    mine = make(folder, tmp_path / "mine", "nowhere", Count())
    train, evaluate = models.specs(hooks=[saver(tmp_path / "elsewhere")])
    for kind, text in failures(world, lambda: estimator.train_and_evaluate(mine, train, evaluate)):
        assert kind == "ConfigurationError"
        assert f"Rank 0 has saved no checkpoint in its model_dir, {folder}" in text


def test_the_hooks_of_tf_estimator_are_those(world: Any) -> None:
    if not estimator.has_tf_estimator():
        pytest.skip("this TensorFlow has no tf.estimator")
    for name in ("CheckpointSaverHook", "SummarySaverHook", "ProfilerHook", "StepCounterHook"):
        assert getattr(tf.estimator, name) is getattr(v1.train, name)
