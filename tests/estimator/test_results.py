"""What train_and_evaluate returns: with all exporters at once, equal on all ranks, and equal to tf.estimator's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator
from tests.estimator import distributed_models as models

v1 = tf.compat.v1
pytestmark = pytest.mark.np(2)


def receiver() -> Any:
    x = v1.placeholder(tf.float32, [None, models.WIDTH], name="x")
    return estimator.export.ServingInputReceiver({"x": x}, {"x": x})


def exporters() -> list[Any]:
    """All three, and a second that finds the first evaluation the best, so that it has nothing to export at the end."""

    def only_the_first(best_eval_result: Any, current_eval_result: Any) -> bool:
        return False

    return [
        estimator.FinalExporter("final", receiver),
        estimator.LatestExporter("latest", receiver, exports_to_keep=2),
        estimator.BestExporter("best", receiver),
        estimator.BestExporter("first", receiver, compare_fn=only_the_first, event_file_pattern=None),
    ]


def described(result: tuple[Any, Any]) -> tuple[dict[str, tuple[str, float]], list[tuple[str, str] | None]]:
    """Return kinds and values of the metrics, and kinds and names of the exports, without their time stamps."""
    metrics, exports = result
    kinds = {name: (type(value).__name__, float(value)) for name, value in metrics.items()}
    return kinds, [
        path and (type(path).__name__, Path(tf.compat.as_str(path)).parent.name)  # where nothing was exported: None
        for path in exports
    ]


def check_same(result: Any, wanted: Any) -> None:
    assert result[1] == wanted[1]
    assert result[0].keys() == wanted[0].keys()
    for name, (kind, value) in wanted[0].items():
        assert result[0][name][0] == kind, name
        np.testing.assert_allclose(result[0][name][1], value, rtol=1e-5, err_msg=name)


def alone(folder: Path) -> Any:
    """Train one process on the whole batches: with tf.estimator's train_and_evaluate itself, where there is one."""
    mine = models.make(folder, distributed=False)
    train, evaluate = models.specs(models.whole_input, exporters=exporters())
    if estimator.has_tf_estimator():
        return tf.estimator.train_and_evaluate(mine, train, evaluate)
    if hvd.size() == 1:
        return hvd.estimator.train_and_evaluate(mine, train, evaluate)
    return None


@pytest.mark.parametrize("evaluation", ["rank 0", "sharded"])
def test_all_exporters_and_what_is_returned(world: Any, folder: Path, tmp_path: Path, evaluation: str) -> None:
    train, evaluate = models.specs(exporters=exporters())
    mine = models.make(folder, seed=world.rank())
    result = hvd.estimator.train_and_evaluate(mine, train, evaluate, evaluation=evaluation)
    assert len({repr(other) for other in world.allgather_object(result)}) == 1
    metrics, (final, latest, best, first) = described(result)
    assert metrics["global_step"] == (np.dtype("int64").name, models.STEPS)
    assert (final, latest, first) == (("bytes", "final"), ("bytes", "latest"), None)
    if world.rank() == 0:
        check_exports(folder, improves=best is not None)
    wanted = alone(tmp_path / "alone")
    if wanted is not None:
        check_same(described(result), described(wanted))


def check_exports(folder: Path, improves: bool) -> None:
    """The final one, the last two of three, and each that was better than all before it."""
    kernels = {name: [kernel(path) for path in sorted((folder / "export" / name).iterdir())] for name in
               ("final", "latest", "best", "first")}  # fmt: skip
    saved = {
        step: v1.train.load_checkpoint(str(folder / f"model.ckpt-{step}")).get_tensor("linear/kernel")
        for step in (2, 4, 6)
    }
    expected = {"final": [6], "latest": [4, 6], "first": [2]}
    for name, steps in expected.items():
        np.testing.assert_array_equal(kernels[name], [saved[step] for step in steps], err_msg=name)
    np.testing.assert_array_equal(kernels["best"][0], saved[2])
    assert np.array_equal(kernels["best"][-1], saved[6]) == improves


def kernel(path: Path) -> np.ndarray:
    """Return the weights in an export."""
    reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
    value: np.ndarray = reader.get_tensor("linear/kernel")
    return value
