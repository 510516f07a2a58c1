"""Training by the Estimator for one process: against NumPy, resumed, stopped, with hooks in their order."""

from __future__ import annotations

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdx.errors import ConfigurationError
from hvdx.estimator import own

from .own_models import FEATURES, LABELS, batches, linear, linear_model_fn, trained_by_hand

v1 = tf.compat.v1


def _assert_trained(estimator: own.Estimator, steps: int) -> None:
    weights, bias, _ = trained_by_hand(steps)
    np.testing.assert_allclose(estimator.get_variable_value("weights"), weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(estimator.get_variable_value("bias"), bias, rtol=1e-4, atol=1e-6)
    assert estimator.get_variable_value("global_step") == steps


def _assert_about_every_second(steps: list[int], first: int, last: int | None = None) -> None:
    """TensorFlow's hooks read the step before or after its increment, as it happens, so some come one step early."""
    assert steps[0] == first
    assert last is None or steps[-1] == last
    assert all(1 <= after - before <= 2 for before, after in itertools.pairwise(steps)), steps


class _Record(own.SessionRunHook):
    """Writes down when it is called, and the loss of each step."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls
        self.losses: list[float] = []

    def begin(self) -> None:
        self.calls.append(f"begin {self.name}")

    def before_run(self, run_context: Any) -> Any:
        return v1.train.SessionRunArgs(v1.get_collection(v1.GraphKeys.LOSSES)[-1])

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.losses.append(float(run_values.results))

    def end(self, session: Any) -> None:
        self.calls.append(f"end {self.name}")


def test_train_is_gradient_descent_and_returns_the_estimator(tmp_path: Path) -> None:
    estimator = linear(tmp_path)
    hook = _Record("user", [])
    assert estimator.train(batches(repeat=None), hooks=[hook], steps=7) is estimator
    _assert_trained(estimator, 7)
    assert hook.losses == pytest.approx([trained_by_hand(n)[2] for n in range(1, 8)], rel=1e-4)
    assert estimator.latest_checkpoint() == str(tmp_path / "model.ckpt-7")
    assert set(estimator.get_variable_names()) == {"bias", "global_step", "weights"}


def test_steps_add_up_and_max_steps_is_an_end(tmp_path: Path) -> None:
    estimator = linear(tmp_path)
    estimator.train(batches(repeat=None), steps=3).train(batches(repeat=None), steps=3)
    _assert_trained(estimator, 6)
    estimator.train(batches(repeat=None), max_steps=9)
    _assert_trained(estimator, 9)


def test_a_new_estimator_resumes_from_the_directory(tmp_path: Path) -> None:
    linear(tmp_path).train(batches(repeat=None), steps=3)
    _assert_trained(linear(tmp_path).train(batches(repeat=None), max_steps=6), 6)


def test_max_steps_that_are_reached_call_nothing(tmp_path: Path) -> None:
    estimator = linear(tmp_path).train(batches(repeat=None), steps=3)

    def never() -> None:
        raise AssertionError("the input was asked for")

    before = sorted(os.listdir(tmp_path))
    assert estimator.train(never, max_steps=3) is estimator
    assert sorted(os.listdir(tmp_path)) == before


def test_the_end_of_the_input_ends_training_with_a_checkpoint(tmp_path: Path) -> None:
    estimator = linear(tmp_path).train(batches(), steps=100)
    _assert_trained(estimator, 3)
    _assert_trained(estimator.train(batches()), 6)


def test_an_empty_input_saves_the_start(tmp_path: Path) -> None:
    estimator = linear(tmp_path).train(batches(rows=0))
    assert estimator.get_variable_value("global_step") == 0


def test_checkpoints_are_kept_as_configured(tmp_path: Path) -> None:
    linear(tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=2).train(batches(repeat=None), steps=5)
    assert sorted(path.stem for path in tmp_path.glob("*.index")) == ["model.ckpt-4", "model.ckpt-5"]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-5")


def test_no_checkpoints_when_both_are_none(tmp_path: Path) -> None:
    estimator = linear(tmp_path, save_checkpoints_steps=None, save_checkpoints_secs=None)
    estimator.train(batches(repeat=None), steps=2)
    assert estimator.latest_checkpoint() is None
    assert not list(tmp_path.glob("*.index"))


def test_hooks_run_in_the_order_of_tf_estimator(tmp_path: Path) -> None:
    calls: list[str] = []

    class Saver(v1.train.CheckpointSaverHook):
        def begin(self) -> None:
            calls.append("begin saver")
            super().begin()

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        spec = linear_model_fn(features, labels, mode)
        chief = [_Record("chief", calls), Saver(str(tmp_path), save_steps=100)]
        return spec._replace(training_hooks=(_Record("spec", calls),), training_chief_hooks=tuple(chief))

    estimator = own.Estimator(model_fn, str(tmp_path))
    estimator.train(batches(), hooks=[_Record("user", calls)], steps=2)
    # MonitoredTrainingSession puts the chief's hooks first.
    assert calls == ["begin chief", "begin saver", "begin user", "begin spec", "end chief", "end user", "end spec"]
    assert len(list(tmp_path.glob("*.index"))) == 2  # by the model's saver: after the first step and at the end


def test_listeners_hear_of_each_checkpoint(tmp_path: Path) -> None:
    steps: list[int] = []

    class Listener(own.CheckpointSaverListener):
        def after_save(self, session: Any, global_step_value: int) -> None:
            steps.append(int(global_step_value))

    estimator = linear(tmp_path, save_checkpoints_steps=2)
    estimator.train(batches(repeat=None), steps=5, saving_listeners=[Listener()])
    _assert_about_every_second(steps, first=0, last=5)
    silent = linear(tmp_path / "b", save_checkpoints_steps=None, save_checkpoints_secs=None)
    with pytest.raises(ConfigurationError, match="nothing saves"):
        silent.train(batches(), steps=1, saving_listeners=[Listener()])


def test_a_loss_that_is_no_number_stops_training(tmp_path: Path) -> None:
    def diverged() -> Any:
        return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS * np.float32("nan"))).batch(8)

    with pytest.raises(own.NanLossDuringTrainingError):
        linear(tmp_path).train(diverged)


def test_a_warm_start_takes_the_weights_and_not_the_step(tmp_path: Path) -> None:
    first = linear(tmp_path / "a").train(batches(repeat=None), steps=4)
    second = own.Estimator(linear_model_fn, str(tmp_path / "b"), warm_start_from=str(tmp_path / "a"))
    second.train(batches(rows=0))
    np.testing.assert_array_equal(second.get_variable_value("weights"), first.get_variable_value("weights"))
    assert second.get_variable_value("global_step") == 0
    third = own.Estimator(linear_model_fn, str(tmp_path / "c"), warm_start_from=own.WarmStartSettings(
        str(tmp_path / "a"), vars_to_warm_start="bias"))  # fmt: skip
    third.train(batches(rows=0))
    np.testing.assert_array_equal(third.get_variable_value("bias"), first.get_variable_value("bias"))
    np.testing.assert_array_equal(third.get_variable_value("weights"), np.zeros((3, 1)))


def test_summaries_of_the_loss_and_the_speed(tmp_path: Path) -> None:
    linear(tmp_path, save_summary_steps=2, log_step_count_steps=2).train(batches(repeat=None), steps=5)
    seen: dict[str, list[int]] = {}
    for path in tmp_path.glob("*.tfevents.*"):
        for event in v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                seen.setdefault(value.tag, []).append(event.step)
    _assert_about_every_second(seen["loss"], first=1)
    assert "global_step/sec" in seen


def test_a_config_on_a_copy_is_what_counts(tmp_path: Path) -> None:
    estimator = linear(tmp_path / "a")
    quiet = copy.copy(estimator)
    quiet._model_dir = str(tmp_path / "b")
    quiet._config = estimator.config.replace(save_checkpoints_secs=None, save_summary_steps=0)
    quiet.train(batches(), steps=2)
    assert not list((tmp_path / "b").glob("*.index"))
    assert estimator.model_dir == str(tmp_path / "a")
