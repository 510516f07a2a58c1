"""Evaluation and prediction by the Estimator for one process, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdx.errors import ConfigurationError, UnsupportedError
from hvdx.estimator import own
from tests.conftest import installed_kerases, load_keras

from .own_models import FEATURES, LABELS, batches, linear, linear_model_fn, trained_by_hand

v1 = tf.compat.v1


def _by_hand(steps: int, size: int, number: int) -> dict[str, float]:
    """Return the evaluation of the linear model after so many steps of training: loss by batch, mae by example."""
    weights, bias, _ = trained_by_hand(steps)
    errors = [FEATURES[i : i + size] @ weights + bias - LABELS[i : i + size] for i in range(0, 24, size)][:number]
    return {
        "loss": float(np.mean([np.mean(error**2) for error in errors])),
        "mae": float(np.mean(np.abs(np.concatenate(errors)))),
        "global_step": steps,
    }


def _summaries(directory: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for path in sorted(directory.glob("*.tfevents.*")):
        for event in v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                kind = value.WhichOneof("value")
                plain = value.simple_value if kind == "simple_value" else tf.make_ndarray(value.tensor).item()
                found.setdefault(value.tag, []).append((event.step, plain))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> own.Estimator:
    """A linear model after four steps, with a checkpoint of the second."""
    return linear(tmp_path_factory.mktemp("trained"), save_checkpoints_steps=2).train(batches(repeat=None), steps=4)


def test_evaluate_the_whole_input_with_a_shorter_last_batch(trained: own.Estimator) -> None:
    assert trained.evaluate(batches(size=10)) == pytest.approx(_by_hand(4, 10, 3), rel=1e-4)


def test_evaluate_some_steps(trained: own.Estimator) -> None:
    assert trained.evaluate(batches(size=5, repeat=None), steps=2) == pytest.approx(_by_hand(4, 5, 2), rel=1e-4)


def test_evaluate_an_earlier_checkpoint(trained: own.Estimator) -> None:
    path = str(Path(trained.model_dir) / "model.ckpt-2")
    assert trained.evaluate(batches(), checkpoint_path=path) == pytest.approx(_by_hand(2, 8, 3), rel=1e-4)


def test_evaluate_without_a_checkpoint_takes_the_initial_model(tmp_path: Path) -> None:
    assert linear(tmp_path).evaluate(batches()) == pytest.approx(_by_hand(0, 8, 3), rel=1e-4)


def test_evaluation_leaves_its_values_and_the_checkpoint_as_summaries(trained: own.Estimator) -> None:
    values = trained.evaluate(batches(), name="again")
    written = _summaries(Path(trained.eval_dir("again")))
    assert trained.eval_dir("again") == str(Path(trained.model_dir) / "eval_again")
    assert trained.eval_dir() == str(Path(trained.model_dir) / "eval")
    assert written["loss"] == [(4, pytest.approx(values["loss"]))]
    assert written["mae"] == [(4, pytest.approx(values["mae"]))]
    assert written["checkpoint_path"] == [(4, (trained.latest_checkpoint() or "").encode())]
    assert "global_step" not in written


def test_what_a_hook_changes_at_its_end_is_in_the_values(trained: own.Estimator) -> None:
    class Double(own.SessionRunHook):
        def begin(self) -> None:
            totals = [v for v in v1.local_variables() if v.name.endswith("/total:0")]
            self.update = tf.group(*(v.assign(v * 2) for v in totals))

        def end(self, session: Any) -> None:
            session.run(self.update)

    plain, doubled = trained.evaluate(batches()), trained.evaluate(batches(), hooks=[Double()])
    assert doubled["loss"] == pytest.approx(2 * plain["loss"])
    assert doubled["mae"] == pytest.approx(2 * plain["mae"])


def test_evaluation_hooks_of_the_model_run_after_those_of_the_caller(tmp_path: Path) -> None:
    calls: list[str] = []

    class Hook(own.SessionRunHook):
        def __init__(self, name: str) -> None:
            self.name = name

        def end(self, session: Any) -> None:
            calls.append(self.name)

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        return linear_model_fn(features, labels, mode)._replace(evaluation_hooks=(Hook("spec"),))

    own.Estimator(model_fn, str(tmp_path)).evaluate(batches(), hooks=[Hook("user")])
    assert calls == ["user", "spec"]


def test_a_local_init_op_of_the_model_does_not_leave_the_metrics_out(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        scaffold = v1.train.Scaffold(local_init_op=tf.no_op())
        return linear_model_fn(features, labels, mode)._replace(scaffold=scaffold)

    values = own.Estimator(model_fn, str(tmp_path)).evaluate(batches())
    assert values == pytest.approx(_by_hand(0, 8, 3), rel=1e-4)


def test_a_metric_named_loss_is_refused(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        return linear_model_fn(features, labels, mode)._replace(eval_metric_ops={"loss": v1.metrics.mean(labels)})

    with pytest.raises(ConfigurationError, match="'loss'"):
        own.Estimator(model_fn, str(tmp_path)).evaluate(batches())


def _with_keras_metric(make: Callable[[], Any]) -> Callable[..., Any]:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        spec = linear_model_fn(features, labels, mode)
        metric = make()
        metric.update_state(tf.reduce_sum(labels, axis=1))
        return spec._replace(eval_metric_ops={"mean_label": metric})

    return model_fn


def test_metrics_of_keras_2(tmp_path: Path) -> None:
    keras2 = load_keras("tf_keras" if "tf_keras" in installed_kerases() else "keras2")
    estimator = own.Estimator(_with_keras_metric(keras2.metrics.Mean), str(tmp_path))
    assert estimator.evaluate(batches(size=10))["mean_label"] == pytest.approx(LABELS.mean(), rel=1e-4)


def test_metrics_of_keras_3_are_refused(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras", minversion="3")
    metric = keras.metrics.Mean()

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        return linear_model_fn(features, labels, mode)._replace(eval_metric_ops={"mean": metric})

    with pytest.raises(UnsupportedError, match="tf_keras"):
        own.Estimator(model_fn, str(tmp_path)).evaluate(batches())


def test_predict_yields_examples(trained: own.Estimator) -> None:
    weights, bias, _ = trained_by_hand(4)
    rows = list(trained.predict(batches(size=10)))
    assert len(rows) == 24
    np.testing.assert_allclose([row["value"] for row in rows], FEATURES @ weights + bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose([row["row_sum"] for row in rows], FEATURES.sum(axis=1), rtol=1e-4, atol=1e-5)


def test_predict_whole_batches_of_some_keys(trained: own.Estimator) -> None:
    found = list(trained.predict(batches(size=10), predict_keys=["row_sum"], yield_single_examples=False))
    assert [set(batch) for batch in found] == [{"row_sum"}] * 3
    assert [len(batch["row_sum"]) for batch in found] == [10, 10, 4]
    with pytest.raises(ConfigurationError, match="none of the predictions"):
        next(trained.predict(batches(), predict_keys=["other"]))


def test_two_predictions_may_be_drawn_in_turn(trained: own.Estimator) -> None:
    alone = [row["value"].item() for row in trained.predict(batches())]
    both = list(zip(trained.predict(batches()), trained.predict(batches(size=5)), strict=True))
    for column in (0, 1):
        assert [rows[column]["value"].item() for rows in both] == pytest.approx(alone, rel=1e-5)
    assert tf.executing_eagerly()


def test_an_unfinished_prediction_leaves_no_graph_behind(trained: own.Estimator) -> None:
    rows = trained.predict(batches())
    next(rows)
    assert tf.executing_eagerly()
    rows.close()  # type: ignore[attr-defined]


def test_predict_runs_hooks_to_their_end(trained: own.Estimator) -> None:
    ended: list[bool] = []

    class Hook(own.SessionRunHook):
        def end(self, session: Any) -> None:
            ended.append(tf.compat.v1.get_default_graph() is session.graph)

    list(trained.predict(batches(), hooks=[Hook()]))
    assert ended == [True]


def test_predictions_of_different_lengths_are_refused(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        return own.EstimatorSpec(mode, predictions={"rows": features, "all": tf.constant([1.0])})

    estimator = own.Estimator(model_fn, str(tmp_path))
    with pytest.raises(ConfigurationError, match="different lengths"):
        list(estimator.predict(batches()))
    assert len(list(estimator.predict(batches(), yield_single_examples=False))) == 3
