"""Exports of the Estimator for one process: SavedModels that predict the same, and the exporters that write them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdx.errors import CheckpointError, ConfigurationError, UnsupportedError
from hvdx.estimator import own

from .own_models import FEATURES, batches, linear, linear_model_fn

v1 = tf.compat.v1


def _receiver() -> Any:
    placeholder = v1.placeholder(tf.float32, [None, 3])
    return own.export.TensorServingInputReceiver(placeholder, placeholder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> own.Estimator:
    """A linear model after four steps, with a checkpoint of the second."""
    return linear(tmp_path_factory.mktemp("trained"), save_checkpoints_steps=2).train(batches(repeat=None), steps=4)


def _predicted(estimator: own.Estimator, **arguments: Any) -> Any:
    return np.array([row["value"] for row in estimator.predict(batches(), **arguments)])


def test_a_saved_model_predicts_what_the_estimator_predicts(trained: own.Estimator, tmp_path: Path) -> None:
    asset = tmp_path / "names.txt"
    asset.write_text("a b c")
    exported = trained.export_saved_model(tmp_path / "export", _receiver, assets_extra={"deep/names.txt": str(asset)})
    assert isinstance(exported, bytes)
    directory = Path(exported.decode())
    assert directory.parent == tmp_path / "export"
    assert abs(int(directory.name) - time.time()) < 120
    assert os.listdir(directory.parent) == [directory.name]
    assert (directory / "assets.extra" / "deep" / "names.txt").read_text() == "a b c"
    served = tf.saved_model.load(str(directory)).signatures["serving_default"](input=tf.constant(FEATURES))
    np.testing.assert_allclose(served["value"], _predicted(trained), rtol=1e-6)
    assert set(served) == {"value", "row_sum"}


def test_an_earlier_checkpoint_is_exported_as_text(trained: own.Estimator, tmp_path: Path) -> None:
    path = str(Path(trained.model_dir) / "model.ckpt-2")
    exported = trained.export_saved_model(str(tmp_path), _receiver, as_text=True, checkpoint_path=path).decode()
    assert (Path(exported) / "saved_model.pbtxt").exists()
    served = tf.saved_model.load(exported).signatures["serving_default"](input=tf.constant(FEATURES))
    np.testing.assert_allclose(served["value"], _predicted(trained, checkpoint_path=path), rtol=1e-6)


def test_the_serving_graph_has_no_training_in_it(trained: own.Estimator, tmp_path: Path) -> None:
    exported = trained.export_saved_model(str(tmp_path), _receiver).decode()
    with tf.Graph().as_default() as graph, v1.Session() as session:
        v1.saved_model.load(session, [tf.saved_model.SERVING], exported)
        kinds = {operation.type for operation in graph.get_operations()}
    assert not {kind for kind in kinds if "Hvdx" in kind or "PyFunc" in kind or "ApplyGradient" in kind}


def _many_outputs(features: Any, labels: Any, mode: str) -> Any:
    spec = linear_model_fn(features["x"], labels, mode)
    value = spec.predictions["value"]
    outputs = {
        tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY: own.export.PredictOutput(value),
        "regression": own.export.RegressionOutput(value[:, 0]),
        "classes": own.export.ClassificationOutput(value, tf.strings.as_string(value)),
    }
    return spec._replace(export_outputs=outputs)


def _untrained(model_fn: Callable[..., Any], model_dir: Path) -> own.Estimator:
    """Return an Estimator of the model with a checkpoint that holds the variables of the linear model at the start."""
    linear(model_dir).train(batches(rows=0))
    return own.Estimator(model_fn, str(model_dir))


def test_signatures_of_examples_and_of_raw_features(tmp_path: Path) -> None:
    estimator = _untrained(_many_outputs, tmp_path / "model")
    spec = {"x": tf.io.FixedLenFeature([3], tf.float32)}
    parsing = own.export.build_parsing_serving_input_receiver_fn(spec)
    loaded = tf.saved_model.load(estimator.export_saved_model(str(tmp_path / "a"), parsing).decode())
    assert set(loaded.signatures) == {"serving_default", "regression", "classes"}
    row = tf.train.Feature(float_list=tf.train.FloatList(value=FEATURES[0]))
    example = tf.train.Example(features=tf.train.Features(feature={"x": row})).SerializeToString()
    assert loaded.signatures["serving_default"](examples=tf.constant([example]))["output"].shape == (1, 1)
    assert loaded.signatures["regression"](inputs=tf.constant([example, example]))["outputs"].shape == (2,)
    raw = own.export.build_raw_serving_input_receiver_fn({"x": tf.constant(FEATURES)})
    loaded = tf.saved_model.load(estimator.export_saved_model(str(tmp_path / "b"), raw).decode())
    assert set(loaded.signatures) == {"serving_default"}  # the others are served from strings
    assert loaded.signatures["serving_default"](x=tf.constant(FEATURES))["output"].shape == (24, 1)


def test_alternative_receivers_and_placeholders_that_are_not_fed(tmp_path: Path) -> None:
    estimator = _untrained(_many_outputs, tmp_path / "model")

    def receiver() -> Any:
        raw = v1.placeholder(tf.float32, [None, 3], "raw")
        scaled = tf.multiply(raw, v1.placeholder_with_default(2.0, []), "scaled")
        other = v1.placeholder(tf.float32, [], "other")
        alternatives = {"scaled": scaled, "other": other}
        return own.export.ServingInputReceiver({"x": scaled}, {"raw": raw}, alternatives)

    loaded = tf.saved_model.load(estimator.export_saved_model(str(tmp_path / "a"), receiver).decode())
    assert set(loaded.signatures) == {"serving_default", "scaled:serving_default"}


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path, trained: own.Estimator) -> None:
    with pytest.raises(ConfigurationError, match="no checkpoint"):
        linear(tmp_path / "empty").export_saved_model(str(tmp_path / "export"), _receiver)
    with pytest.raises(ConfigurationError, match="must be a function"):
        trained.export_saved_model(str(tmp_path / "export"), None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"TensorFlow 2\.15"):
        trained.export_saved_model(str(tmp_path / "export"), _receiver, experimental_mode=own.ModeKeys.TRAIN)
    with pytest.raises(ConfigurationError, match="ServingInputReceiver"):
        trained.export_saved_model(str(tmp_path / "export"), lambda: 1)

    def larger(features: Any, labels: Any, mode: str) -> Any:
        v1.get_variable("more", [2])
        return linear_model_fn(features, labels, mode)

    with pytest.raises(CheckpointError, match="more"):
        own.Estimator(larger, trained.model_dir).export_saved_model(str(tmp_path / "export"), _receiver)
    assert not (tmp_path / "export").exists() or os.listdir(tmp_path / "export") == []


def test_receivers_and_outputs_refuse_what_is_no_tensor() -> None:
    with tf.Graph().as_default():
        words, numbers = tf.constant(["a"]), tf.constant([1.0])
        outputs = own.export
        assert outputs.PredictOutput({("head", "value"): numbers}).outputs == {"head/value": numbers}
        for wrong in (
            lambda: outputs.PredictOutput({"value": 1.0}),
            lambda: outputs.PredictOutput({1: numbers}),
            lambda: outputs.RegressionOutput(words),
            lambda: outputs.ClassificationOutput(),
            lambda: outputs.ClassificationOutput(scores=words),
            lambda: outputs.ClassificationOutput(classes=numbers),
            lambda: outputs.ServingInputReceiver(None, numbers),
            lambda: outputs.ServingInputReceiver({"x": 1}, numbers),
            lambda: outputs.ServingInputReceiver(numbers, {1: numbers}),
            lambda: outputs.ServingInputReceiver(numbers, numbers, [numbers]),
            lambda: outputs.TensorServingInputReceiver({"x": numbers}, numbers),
            lambda: own.EstimatorSpec("infer", predictions=numbers, export_outputs={"a": numbers}),
            lambda: own.EstimatorSpec("infer", predictions=numbers, export_outputs=[numbers]),
            lambda: own.EstimatorSpec(
                "infer",
                predictions=numbers,
                export_outputs={name: outputs.PredictOutput(numbers) for name in ("a", "b")},
            ),
        ):
            with pytest.raises(ConfigurationError):
                wrong()


class _Recorder:
    """Stands for an Estimator: notes what is exported, into directories one second apart."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = str(model_dir)
        self.checkpoints: list[str] = []

    def export_saved_model(self, base: str, receiver: Any, **arguments: Any) -> bytes:
        self.checkpoints.append(arguments["checkpoint_path"])
        path = Path(base) / str(1700000000 + len(self.checkpoints))
        path.mkdir(parents=True)
        return os.fsencode(path)


def _export(exporter: own.Exporter, estimator: Any, base: Path, losses: list[float], final: bool = False) -> None:
    for number, loss in enumerate(losses):
        exporter.export(estimator, str(base), f"c{number}", {"loss": loss}, final and number == len(losses) - 1)


def test_final_exporter_exports_once(tmp_path: Path) -> None:
    estimator = _Recorder(tmp_path)
    _export(own.FinalExporter("final", _receiver), estimator, tmp_path / "e", [3.0, 2.0, 1.0], final=True)
    assert estimator.checkpoints == ["c2"]


def test_latest_exporter_keeps_the_newest(tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "notes").mkdir()
    estimator = _Recorder(tmp_path)
    _export(own.LatestExporter("latest", _receiver, exports_to_keep=2), estimator, tmp_path / "e", [1.0] * 4)
    assert estimator.checkpoints == ["c0", "c1", "c2", "c3"]
    assert sorted(os.listdir(tmp_path / "e")) == ["1700000003", "1700000004", "notes"]
    everything = _Recorder(tmp_path)
    _export(own.LatestExporter("all", _receiver, exports_to_keep=None), everything, tmp_path / "f", [1.0] * 7)
    assert len(os.listdir(tmp_path / "f")) == 7


def test_best_exporter_exports_what_is_better(tmp_path: Path) -> None:
    estimator = _Recorder(tmp_path)
    best = own.BestExporter("best", _receiver, exports_to_keep=2)
    _export(best, estimator, tmp_path / "e", [5.0, 6.0, 4.0, 4.0, 3.0])
    assert estimator.checkpoints == ["c0", "c2", "c4"]
    assert len(os.listdir(tmp_path / "e")) == 2


def _more_hits(best_eval_result: Any, current_eval_result: Any) -> bool:
    return current_eval_result["hits"] > best_eval_result["hits"]


def test_best_exporter_reads_the_event_files_of_the_next_directory(tmp_path: Path) -> None:
    with tf.Graph().as_default():
        for loss in (4.0, 2.0, 3.0):
            writer = v1.summary.FileWriter(str(tmp_path / "b" / "eval"), filename_suffix=str(loss))
            writer.add_summary(v1.Summary(value=[v1.Summary.Value(tag="loss", simple_value=loss)]), 1)
            writer.close()
    exporter = own.BestExporter("best", _receiver)
    _export(exporter, _Recorder(tmp_path / "a"), tmp_path / "e", [9.0])
    other = _Recorder(tmp_path / "b")
    _export(exporter, other, tmp_path / "f", [2.5, 1.5])
    assert other.checkpoints == ["c1"]


def test_best_exporter_by_another_metric_and_what_it_refuses(tmp_path: Path) -> None:
    estimator = _Recorder(tmp_path)
    exporter = own.BestExporter("best", _receiver, compare_fn=_more_hits)
    for number, hits in enumerate((1, 0, 2)):
        exporter.export(estimator, str(tmp_path / "e"), f"c{number}", {"hits": hits}, False)
    assert estimator.checkpoints == ["c0", "c2"]
    with pytest.raises(ConfigurationError, match="compare_fn"):
        own.BestExporter("best", _receiver, compare_fn=lambda best, current: True)
    with pytest.raises(ConfigurationError, match="exports_to_keep"):
        own.BestExporter("best", _receiver, exports_to_keep=0)
    losses = own.BestExporter("best", _receiver)
    losses.export(estimator, str(tmp_path / "g"), "c0", {"hits": 1}, False)
    with pytest.raises(ConfigurationError, match="'loss'"):
        losses.export(estimator, str(tmp_path / "g"), "c1", {"hits": 1}, False)


def test_an_exporter_writes_a_saved_model(trained: own.Estimator, tmp_path: Path) -> None:
    checkpoint = trained.latest_checkpoint() or ""
    exported = own.LatestExporter("latest", _receiver).export(trained, str(tmp_path), checkpoint, {}, False)
    assert tf.saved_model.contains_saved_model(exported.decode())
