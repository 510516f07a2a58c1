"""What the Estimator for one process is given: specs, RunConfig, model_fn and input_fn, and what it refuses."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from hvdx.errors import ConfigurationError, UnsupportedError
from hvdx.estimator import own

from .own_models import FEATURES, LABELS, batches, linear, linear_model_fn

v1 = tf.compat.v1


def test_run_config_saves_every_ten_minutes_unless_told() -> None:
    def saving(**given: Any) -> tuple[Any, Any]:
        config = own.RunConfig(**given)
        return config.save_checkpoints_steps, config.save_checkpoints_secs

    assert saving() == (None, 600)
    assert saving(save_checkpoints_steps=5) == (5, None)
    assert saving(save_checkpoints_secs=5) == (None, 5)
    assert saving(save_checkpoints_steps=None) == (None, None)
    assert saving(save_checkpoints_steps=None, save_checkpoints_secs=7) == (None, 7)
    with pytest.raises(ConfigurationError, match="both"):
        own.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1)


def test_run_config_replace() -> None:
    config = own.RunConfig("a", tf_random_seed=3)
    other = config.replace(model_dir=Path("b"), save_checkpoints_steps=4)
    assert (config.model_dir, config.save_checkpoints_secs) == ("a", 600)
    assert (other.model_dir, other.tf_random_seed) == ("b", 3)
    assert (other.save_checkpoints_steps, other.save_checkpoints_secs) == (4, None)
    assert other.replace(save_checkpoints_secs=9).save_checkpoints_steps is None
    assert other.replace(save_checkpoints_steps=None).save_checkpoints_secs is None
    with pytest.raises(ConfigurationError, match="task_id"):
        config.replace(task_id=1)
    with pytest.raises(ConfigurationError, match="both"):
        config.replace(save_checkpoints_steps=1, save_checkpoints_secs=1)


def test_run_config_is_of_one_chief() -> None:
    config = copy.deepcopy(own.RunConfig())
    assert (config.is_chief, config.task_type, config.task_id, config.global_id_in_cluster) == (True, "worker", 0, 0)
    assert (config.num_ps_replicas, config.num_worker_replicas) == (0, 1)
    assert (config.master, config.evaluation_master, config.service) == ("", "", None)
    assert not config.cluster_spec
    with pytest.raises(AttributeError, match="no_such_setting"):
        config.no_such_setting  # noqa: B018


@pytest.mark.parametrize(
    "given",
    [
        {"model_dir": ""},
        {"tf_random_seed": 1.5},
        {"save_summary_steps": -1},
        {"save_checkpoints_steps": -1},
        {"keep_checkpoint_max": -1},
        {"keep_checkpoint_every_n_hours": 0},
        {"log_step_count_steps": 0},
        {"session_creation_timeout_secs": 0},
        {"session_config": {}},
        {"device_fn": lambda other: None},
        {"protocol": "http"},
        {"experimental_max_worker_delay_secs": "1"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_run_config_refuses(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(given))):
        own.RunConfig(**given)


@pytest.mark.parametrize("name", ["train_distribute", "eval_distribute", "experimental_distribute"])
def test_strategies_are_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(UnsupportedError, match="hvdxrun"):
        own.RunConfig(**{name: tf.distribute.get_strategy()})
    with pytest.raises(UnsupportedError, match=name):
        own.RunConfig().replace(**{name: tf.distribute.get_strategy()})


def test_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(settings: Any) -> own.RunConfig:
        monkeypatch.setenv("TF_CONFIG", settings if isinstance(settings, str) else json.dumps(settings))
        return own.RunConfig()

    assert read({"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}}).is_chief
    assert read({"model_dir": "d"}).model_dir == "d"
    with pytest.raises(ConfigurationError, match="TF_CONFIG says 'd'"):
        own.RunConfig("e")
    with pytest.raises(UnsupportedError, match=r"cluster of 2 tasks.*hvdxrun"):
        read({"cluster": {"chief": ["a:1"], "worker": ["a:2"]}, "task": {"type": "worker", "index": 0}})
    with pytest.raises(UnsupportedError, match="evaluator"):
        read({"task": {"type": "evaluator", "index": 0}})
    for text in ("{", "[]", '{"cluster": 1}'):
        with pytest.raises(ConfigurationError, match="no JSON object"):
            read(text)


class _Exporter(own.Exporter):
    def __init__(self, name: Any) -> None:
        self._name = name

    @property
    def name(self) -> Any:
        return self._name

    def export(self, *arguments: Any) -> None:
        return None


def test_train_spec() -> None:
    input_fn, hook, listener = batches(), own.SessionRunHook(), own.CheckpointSaverListener()
    assert own.TrainSpec(input_fn) == (input_fn, None, (), ())
    assert own.TrainSpec(input_fn, 3, [hook], [listener]) == (input_fn, 3, (hook,), (listener,))
    for wrong in (("data",), (input_fn, 0), (input_fn, 1, ["hook"]), (input_fn, 1, [], [hook]), (input_fn, 1, 5)):
        with pytest.raises(ConfigurationError):
            own.TrainSpec(*wrong)  # type: ignore[arg-type]


def test_eval_spec() -> None:
    input_fn, one = batches(), _Exporter("one")
    assert own.EvalSpec(input_fn) == (input_fn, 100, None, (), (), 120, 600)
    assert own.EvalSpec(input_fn, exporters=one).exporters == (one,)
    assert own.EvalSpec(input_fn, exporters=[one, _Exporter("two")]).exporters[0] is one
    for wrong in (
        {"steps": 0},
        {"name": 1},
        {"hooks": [1]},
        {"start_delay_secs": -1},
        {"throttle_secs": -1},
        {"exporters": 3},
        {"exporters": [one, "two"]},
        {"exporters": [one, _Exporter("one")]},
        {"exporters": _Exporter(None)},
        {"exporters": _Exporter(1)},
    ):
        with pytest.raises(ConfigurationError):
            own.EvalSpec(input_fn, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        own.EvalSpec("data")  # type: ignore[arg-type]


def test_estimator_spec_refuses_what_the_mode_lacks() -> None:
    with tf.Graph().as_default():
        elsewhere = tf.constant(1.0)
    with tf.Graph().as_default():
        loss, op = tf.constant([1.0]), tf.no_op()
        assert own.EstimatorSpec("train", loss=loss, train_op=op).loss.shape == []
        spec = own.EstimatorSpec("eval", loss=loss)
        assert spec._replace(predictions=loss).predictions is loss
        for mode, given in (
            ("train", {"loss": loss}),
            ("train", {"train_op": op}),
            ("train", {"loss": loss, "train_op": "op"}),
            ("eval", {}),
            ("eval", {"loss": 1.0}),
            ("eval", {"loss": tf.zeros([2])}),
            ("eval", {"loss": elsewhere}),
            ("eval", {"loss": loss, "eval_metric_ops": {"a": loss}}),
            ("eval", {"loss": loss, "eval_metric_ops": {"a": (elsewhere, elsewhere)}}),
            ("eval", {"loss": loss, "eval_metric_ops": [loss]}),
            ("eval", {"loss": loss, "scaffold": 1}),
            ("eval", {"loss": loss, "evaluation_hooks": [1]}),
            ("infer", {}),
            ("infer", {"predictions": {"a": 1}}),
        ):
            with pytest.raises(ConfigurationError):
                own.EstimatorSpec(mode, **given)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="mode"):
            spec._replace(mode="train")


def test_a_model_fn_is_checked_before_anything_runs(tmp_path: Path) -> None:
    def other(features: Any, labels: Any, mode: str, scale: float) -> Any:
        raise AssertionError

    own.Estimator(functools.partial(other, scale=1.0), str(tmp_path))
    for wrong in (None, lambda labels, mode: None, other):
        with pytest.raises(ConfigurationError):
            own.Estimator(wrong, str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="params"):
        own.Estimator(linear_model_fn, str(tmp_path), params={"rate": 1})
    with pytest.raises(ConfigurationError, match="must return an EstimatorSpec"):
        own.Estimator(lambda features, labels, mode: None, str(tmp_path)).train(batches())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="does not take `labels`"):
        own.Estimator(lambda features, mode: None, str(tmp_path)).train(batches())  # type: ignore[arg-type]


def test_an_estimator_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="RunConfig"):
        own.Estimator(linear_model_fn, config={})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="one of them"):
        own.Estimator(linear_model_fn, "a", own.RunConfig("b"))
    with pytest.raises(ConfigurationError, match="warm_start_from"):
        own.Estimator(linear_model_fn, "a", warm_start_from=3)  # type: ignore[arg-type]

    class Sub(own.Estimator):
        def train(self, *arguments: Any) -> Any:  # type: ignore[override]
            return self

    with pytest.raises(ConfigurationError, match="overrides train"):
        Sub(linear_model_fn, str(tmp_path))
    assert Path(own.Estimator(linear_model_fn).model_dir).is_dir()
    estimator = linear(tmp_path)
    for call in (
        lambda: estimator.train(batches(), steps=1, max_steps=1),
        lambda: estimator.train(batches(), steps=0),
        lambda: estimator.train(batches(), max_steps=-1),
        lambda: estimator.train(batches(), hooks=["hook"]),
        lambda: estimator.evaluate(batches(), steps=0),
        lambda: estimator.get_variable_names(),
        lambda: estimator.get_variable_value("weights"),
        lambda: estimator.train("data"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigurationError):
            call()


def test_an_input_fn_gets_what_it_takes(tmp_path: Path) -> None:
    seen: list[Any] = []

    def model_fn(features: Any, labels: Any, mode: str, params: Any, config: Any) -> Any:
        params["rate"] = 99
        seen.append((mode, config.tf_random_seed))
        return linear_model_fn(features, labels, mode)

    def input_fn(mode: str, params: Any, config: Any, input_context: Any) -> Any:
        seen.append((mode, params["rate"], config.tf_random_seed, input_context.num_input_pipelines))
        return batches()()

    given = {"rate": 1}
    estimator = own.Estimator(model_fn, str(tmp_path), own.RunConfig(tf_random_seed=4), given)
    estimator.train(input_fn)
    estimator.evaluate(input_fn)
    assert seen == [("train", 1, 4, 1), ("train", 4), ("eval", 1, 4, 1), ("eval", 4)]
    assert estimator.params == given == {"rate": 1}

    def with_default(input_context: Any = None) -> Any:
        assert input_context is None
        return batches()()

    estimator.train(with_default)
    with tf.Graph().as_default():
        v1.train.create_global_step()
        spec = estimator.model_fn(tf.constant(FEATURES), tf.constant(LABELS), "eval", estimator.config)
        assert spec.mode == "eval"


def test_inputs_of_tensors_and_of_features_alone(tmp_path: Path) -> None:
    estimator = linear(tmp_path).train(lambda: (tf.constant(FEATURES), tf.constant(LABELS)), steps=2)
    assert estimator.get_variable_value("global_step") == 2
    rows = estimator.predict(lambda: tf.data.Dataset.from_tensor_slices(FEATURES).batch(8))
    assert len(list(rows)) == 24
    assert next(estimator.predict(lambda: tf.constant(FEATURES)))["row_sum"] == pytest.approx(FEATURES[0].sum())


def test_an_input_fn_that_returns_nothing_or_three_values(tmp_path: Path) -> None:
    for call in (linear(tmp_path).train, linear(tmp_path).evaluate):
        with pytest.raises(ConfigurationError, match="returned None"):
            call(lambda: None)  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match="3 values"):
        linear(tmp_path).train(lambda: (1, 2, 3))
    dataset = batches()()
    with pytest.raises(ConfigurationError, match="outside of input_fn"):
        linear(tmp_path).train(lambda: dataset)


def test_what_is_left_out_names_the_way_out() -> None:
    for name in ("DNNClassifier", "LinearRegressor", "MultiHead", "experimental", "add_metrics"):
        with pytest.raises(UnsupportedError, match=rf"hvdx\.estimator\.{name} .*TensorFlow 2\.15"):
            own.left_out(name)
    with pytest.raises(AttributeError, match="NoSuchThing"):
        own.left_out("NoSuchThing")


def test_every_name_of_tf_estimator_is_offered_or_left_out() -> None:
    original = pytest.importorskip("tensorflow_estimator").python.estimator.api._v2.estimator
    elsewhere = {"train_and_evaluate"}
    for name in set(dir(original)) - elsewhere:
        if not name.startswith("_") and not hasattr(own, name):
            with pytest.raises(UnsupportedError):
                own.left_out(name)
