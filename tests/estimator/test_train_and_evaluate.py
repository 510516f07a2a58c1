"""train_and_evaluate on several ranks against one process: weights, losses, metrics, files, and where it stops."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator
from tests.estimator import distributed_models as models

v1 = tf.compat.v1
pytestmark = pytest.mark.np(2, 3)
NAMES = ("linear/kernel", "linear/bias")


class Watch(v1.train.SessionRunHook):  # type: ignore[name-defined]
    """Keeps the loss of every step and the weights at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[np.ndarray] = []
        self.steps = 0

    def begin(self) -> None:
        self._variables = v1.trainable_variables()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.steps += 1

    def end(self, session: Any) -> None:
        self.weights = session.run(self._variables)


def reference(tmp_path: Path, max_steps: int = models.STEPS) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Train one process on whole batches."""
    watch = Watch()
    alone = models.make(tmp_path / "alone", distributed=False)
    alone.train(models.whole_input, hooks=[watch], max_steps=max_steps)
    return watch.weights, alone.evaluate(models.eval_input)


@pytest.mark.parametrize("evaluation", ["rank 0", "sharded"])
def test_as_one_process(world: Any, folder: Path, tmp_path: Path, evaluation: str) -> None:
    watch = Watch()
    train, evaluate = models.specs(hooks=[watch], exporters=[exporter()])
    mine = models.make(folder, seed=world.rank())
    metrics, exports = hvd.estimator.train_and_evaluate(mine, train, evaluate, evaluation=evaluation)
    weights, expected = reference(tmp_path)
    for value, wanted in zip(watch.weights, weights, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    everybody = world.allgather_object([value.tobytes() for value in watch.weights])
    assert all(other == everybody[0] for other in everybody)
    assert metrics is not None
    assert metrics["global_step"] == models.STEPS
    for name in ("loss", "mae", "auc"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    assert len(set(world.allgather_object((str(sorted(metrics.items())), str(exports))))) == 1
    if world.rank() == 0:
        check_files(folder, exports)


def exporter() -> Any:
    def receiver() -> Any:
        x = v1.placeholder(tf.float32, [None, models.WIDTH], name="x")
        return estimator.export.ServingInputReceiver({"x": x}, {"x": x})

    return estimator.FinalExporter("final", receiver)


def check_files(folder: Path, exports: Any) -> None:
    """Checkpoints, events of training and evaluation, and an export that needs no hvdx."""
    names = sorted(os.listdir(folder))
    assert f"model.ckpt-{models.STEPS}.index" in names
    assert any(name.startswith("events.out") for name in names)
    assert any(name.startswith("events.out") for name in os.listdir(folder / "eval"))
    [path] = exports
    loaded = tf.saved_model.load(tf.compat.as_str(path))
    kernel, bias = (tf.train.load_variable(str(folder), name) for name in NAMES)
    served = loaded.signatures["serving_default"](x=tf.constant(models.EVAL_X))["y"].numpy()
    np.testing.assert_allclose(served, models.EVAL_X @ kernel + bias, rtol=1e-5)
    graph = loaded.signatures["serving_default"].graph.as_graph_def()
    kinds = {node.op for node in graph.node} | {n.op for f in graph.library.function for n in f.node_def}
    assert not {kind for kind in kinds if "PyFunc" in kind or "Horovod" in kind or "Collective" in kind}


def test_other_ranks_write_nothing_and_need_no_directory(world: Any, folder: Path, tmp_path: Path) -> None:
    mine = models.make(folder if world.rank() == 0 else None, seed=world.rank())
    made = None if world.rank() == 0 else mine.model_dir
    hvd.estimator.train_and_evaluate(mine, *models.specs())
    if made is not None:
        assert os.listdir(made) == []
        os.rmdir(made)


def test_resumes_from_rank_0_and_ends_at_once_when_finished(world: Any, folder: Path, tmp_path: Path) -> None:
    """The other ranks were given no directory, so they see nothing of what was saved."""
    mine = folder if world.rank() == 0 else None
    hvd.estimator.train_and_evaluate(models.make(mine, seed=world.rank()), *models.specs(max_steps=2))
    watch = Watch()

    def rest(input_context: Any) -> Any:
        return models.sharded_input(input_context).skip(2)

    train, evaluate = models.specs(rest, hooks=[watch])
    metrics, _ = hvd.estimator.train_and_evaluate(models.make(mine, seed=7), train, evaluate)
    assert watch.steps == models.STEPS - 2
    assert metrics is not None
    for value, wanted in zip(watch.weights, reference(tmp_path)[0], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    again = Watch()
    train, evaluate = models.specs(hooks=[again])
    assert hvd.estimator.train_and_evaluate(models.make(mine), train, evaluate) == (None, None)
    assert again.steps == 0


def test_data_that_end_early_on_one_rank_end_all(world: Any, folder: Path) -> None:
    last = world.size() - 1

    def short(input_context: Any) -> Any:
        data = models.sharded_input(input_context)
        return data.take(3) if input_context.input_pipeline_id == last else data

    watch = Watch()
    train, evaluate = models.specs(short, max_steps=None, hooks=[watch])
    metrics, _ = hvd.estimator.train_and_evaluate(models.make(folder), train, evaluate)
    assert watch.steps == 3
    assert metrics is not None
    assert metrics["global_step"] == 3


def test_a_hook_on_one_rank_stops_all(world: Any, folder: Path) -> None:
    class Stop(v1.train.SessionRunHook):  # type: ignore[name-defined]
        steps = 0

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.steps += 1
            if world.rank() == world.size() - 1 and self.steps == 4:
                run_context.request_stop()

    stop = Stop()
    train, evaluate = models.specs(hooks=[stop])
    metrics, _ = hvd.estimator.train_and_evaluate(models.make(folder), train, evaluate)
    assert stop.steps == 4
    assert metrics is not None
    assert metrics["global_step"] == 4


@pytest.mark.parametrize("evaluation", ["rank 0", "sharded"])
def test_evaluates_every_checkpoint_with_all_hooks(world: Any, folder: Path, evaluation: str) -> None:
    class Count(v1.train.SessionRunHook):  # type: ignore[name-defined]
        evaluations, batches = 0, 0

        def begin(self) -> None:
            self.evaluations += 1

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.batches += 1

    hooks = [Count(), Count()]
    train, _ = models.specs()
    evaluate = estimator.EvalSpec(
        models.eval_input, steps=2, hooks=hooks, name="held_out", start_delay_secs=0, throttle_secs=0
    )
    hvd.estimator.train_and_evaluate(models.make(folder), train, evaluate, evaluation=evaluation)
    here = evaluation == "sharded" or world.rank() == 0
    batches = {"rank 0": 2, "sharded": min(2, len(range(world.rank(), 5, world.size())))}[evaluation]
    for hook in hooks:
        assert hook.evaluations == (3 if here else 0)
        assert hook.batches == (3 * batches if here else 0)
    if world.rank() == 0:
        assert (folder / "eval_held_out").is_dir()


@pytest.mark.parametrize("setting", ["throttle_secs", "start_delay_secs"])
def test_evaluations_in_between_wait_their_time(world: Any, folder: Path, setting: str) -> None:
    """The last checkpoint is evaluated in any case; of the earlier ones, the throttle lets the first through."""
    if world.size() == 1 and setting == "start_delay_secs":
        pytest.skip("does not count in one process")
    begun: list[int] = []

    class Begin(v1.train.SessionRunHook):  # type: ignore[name-defined]
        def begin(self) -> None:
            begun.append(1)

    train, evaluate = models.specs(**{setting: 1000})
    evaluate = evaluate._replace(hooks=(Begin(),))
    hvd.estimator.train_and_evaluate(models.make(folder), train, evaluate)
    assert len(begun) == (0 if world.rank() else {"throttle_secs": 2, "start_delay_secs": 1}[setting])


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_accumulation_counts_updates(world: Any, folder: Path, tmp_path: Path, optimizer: str) -> None:
    """Each half batch is a pass; the global step counts updates, and max_steps means updates."""
    make = {"adam": lambda: v1.train.AdamOptimizer(0.1), "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9)}

    def halves(input_context: Any) -> Any:
        return models.sharded_input(input_context).unbatch().batch(models.BATCH // world.size() // 2)

    watch = Watch()
    train, evaluate = models.specs(halves, hooks=[watch])
    mine = models.make(folder, passes=2, optimizer=make[optimizer])
    metrics, _ = hvd.estimator.train_and_evaluate(mine, train, evaluate)
    alone, expected = models.make(tmp_path / "alone", distributed=False, optimizer=make[optimizer]), Watch()
    alone.train(models.whole_input, hooks=[expected], max_steps=models.STEPS)
    assert metrics is not None
    assert metrics["global_step"] == models.STEPS
    assert watch.steps == 2 * models.STEPS
    for value, wanted in zip(watch.weights, expected.weights, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


def test_plain_calls_with_hooks(world: Any, tmp_path: Path) -> None:
    """Horovod's way: train and evaluate called by the program, hooks given by hand."""
    watch = Watch()
    mine = models.make(tmp_path / "own", seed=world.rank())
    hooks = [hvd.BroadcastGlobalVariablesHook(0), watch]
    mine.train(lambda: models._part(world.size(), world.rank()), hooks=hooks, max_steps=models.STEPS)
    part = estimator.shard_input_fn(models.eval_input)
    metrics = mine.evaluate(part, hooks=[estimator.MetricAverageHook()])
    weights, expected = reference(tmp_path)
    for value, wanted in zip(watch.weights, weights, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    for name in ("loss", "mae", "auc"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)


def test_sharded_evaluation_of_shuffled_data(world: Any, folder: Path, tmp_path: Path) -> None:
    """The ranks shuffle alike, so each row is counted once; an average that the user asks for too is made once."""

    def shuffled() -> Any:
        return tf.data.Dataset.from_tensor_slices(({"x": models.EVAL_X}, models.EVAL_Y)).shuffle(10).batch(1)

    train, evaluate = models.specs()
    evaluate = evaluate._replace(input_fn=shuffled, hooks=(estimator.MetricAverageHook(),))
    mine = models.make(folder, seed=world.rank())
    metrics, _ = hvd.estimator.train_and_evaluate(mine, train, evaluate, evaluation="sharded")
    _, expected = reference(tmp_path)
    assert metrics is not None
    for name in ("loss", "mae", "auc"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)


def test_listeners_and_exporters_run_on_rank_0(world: Any, folder: Path) -> None:
    """Results come in the order of the exporters; a listener that asks for it stops all ranks."""
    if world.size() == 1 and estimator.has_tf_estimator():
        pytest.skip("what tf.estimator itself does")
    events: list[str] = []

    class Listener(v1.train.CheckpointSaverListener):  # type: ignore[name-defined]
        def after_save(self, session: Any, global_step_value: Any) -> bool:
            events.append(f"saved {int(global_step_value)}")
            return int(global_step_value) >= 4

    class Recorder(estimator.Exporter):  # type: ignore[name-defined,misc]
        def __init__(self, name: str) -> None:
            self._name = name

        @property
        def name(self) -> str:
            return self._name

        def export(
            self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Any, is_the_final_export: bool
        ) -> str:
            events.append(f"{self._name} {Path(checkpoint_path).name} {is_the_final_export}")
            return f"{self._name} of step {eval_result['global_step']}"

    train, evaluate = models.specs()
    train = train._replace(saving_listeners=(Listener(),))
    evaluate = evaluate._replace(exporters=(Recorder("b"), Recorder("a")))
    _, exports = hvd.estimator.train_and_evaluate(models.make(folder), train, evaluate)
    assert exports == ["b of step 4", "a of step 4"]
    if world.rank() > 0:
        assert events == []
        return
    exported = [f"{name} model.ckpt-{step} False" for step in (2, 4) for name in ("b", "a")]
    assert [event for event in events if "model" in event] == exported
    assert [event for event in events if "saved" in event][:3] == ["saved 0", "saved 2", "saved 4"]


def adam_by_hand() -> tuple[list[float], list[np.ndarray]]:
    """Return losses and weights of the model on whole batches (Kingma and Ba 2014, section 2, as TensorFlow has it)."""
    weights = [np.full((models.WIDTH, 1), 0.1), np.zeros(1)]
    first, second = ([np.zeros_like(w) for w in weights] for _ in range(2))
    losses = []
    for step in range(1, models.STEPS + 1):
        rows = slice((step - 1) * models.BATCH, step * models.BATCH)
        error = models.X[rows] @ weights[0] + weights[1] - models.Y[rows]
        losses.append(float(np.mean(error**2)))
        gradients = [models.X[rows].T @ error * 2 / models.BATCH, 2 * error.mean(0)]
        rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        for index, gradient in enumerate(gradients):
            first[index] = 0.9 * first[index] + 0.1 * gradient
            second[index] = 0.999 * second[index] + 0.001 * gradient**2
            weights[index] = weights[index] - rate * first[index] / (np.sqrt(second[index]) + 1e-8)
    return losses, weights


def test_losses_are_the_same_on_every_tensorflow(world: Any, folder: Path) -> None:
    """The same numbers, worked out without TensorFlow, hold on any number of ranks in both environments."""

    class Losses(v1.train.SessionRunHook):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.found: list[float] = []

        def before_run(self, run_context: Any) -> Any:
            return v1.train.SessionRunArgs(v1.losses.get_losses()[0])

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.found.append(float(run_values.results))

    losses, watch = Losses(), Watch()
    train, evaluate = models.specs(hooks=[losses, watch])
    hvd.estimator.train_and_evaluate(models.make(folder, constant=0.1), train, evaluate)
    means = np.mean(world.allgather_object(losses.found), 0)
    expected, weights = adam_by_hand()
    np.testing.assert_allclose(means, expected, rtol=1e-5)
    for value, wanted in zip(watch.weights, weights, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
