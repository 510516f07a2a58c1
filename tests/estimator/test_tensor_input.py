"""input_fn that return tensors, of iterators and queues of their own: the ranks end together here as with datasets."""

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
from tests.estimator.watching import Watch

v1 = tf.compat.v1
pytestmark = pytest.mark.np(2, 3, plain=False)
SHORT = 3  # steps of the rank whose data end first


def part(world: Any, *, short: int = SHORT) -> Any:
    """This rank's part of every global batch; the last rank has fewer batches."""
    data = models._part(world.size(), world.rank())
    return data.take(short) if world.rank() == world.size() - 1 else data


def one_shot(world: Any) -> Any:
    """The input is in a summary of rank 0 too, which must not read batches of its own."""
    x, y = v1.data.make_one_shot_iterator(part(world)).get_next()
    v1.summary.scalar("corner", x["x"][0, 0])
    return x, y


def initializable(world: Any) -> Any:
    iterator = v1.data.make_initializable_iterator(part(world))
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def queue(world: Any) -> Any:
    """Queue runners fill two queues."""
    rows = models.X.reshape(models.STEPS, models.BATCH, models.WIDTH)[:, world.rank() :: world.size()]
    labels = models.Y.reshape(models.STEPS, models.BATCH, 1)[:, world.rank() :: world.size()]
    steps = SHORT if world.rank() == world.size() - 1 else models.STEPS
    arrays = [rows[:steps].reshape(-1, models.WIDTH), labels[:steps].reshape(-1, 1)]
    row = v1.train.slice_input_producer(arrays, num_epochs=1, shuffle=False)
    x, y = v1.train.batch(row, models.BATCH // world.size())
    return {"x": x}, y


def sparse(world: Any) -> Any:
    """The features are of three tensors; a constant stands beside them."""
    data = part(world).map(lambda x, y: ({"x": tf.sparse.from_dense(x["x"])}, y))
    features, labels = v1.data.make_one_shot_iterator(data).get_next()
    return {**features, "constant": tf.constant([1.0])}, labels


def dense_model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
    x = features["x"]
    dense = tf.reshape(tf.sparse.to_dense(x), [-1, models.WIDTH]) if isinstance(x, tf.SparseTensor) else x
    return models.model_fn({"x": dense}, labels, mode, params)


def make(folder: Path, **params: Any) -> Any:
    config = estimator.RunConfig(save_checkpoints_steps=2, save_summary_steps=1)
    return estimator.Estimator(dense_model_fn, model_dir=str(folder), config=config, params=params)


@pytest.fixture
def expected(tmp_path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Weights and metrics of one process with the batches that all ranks had."""
    watch = Watch()
    alone = models.make(tmp_path / "alone", distributed=False)
    alone.train(models.whole_input, hooks=[watch], max_steps=SHORT)
    return watch.weights, alone.evaluate(models.eval_input)


def run_short(world: Any, folder: Path, expected: Any, kind: Callable[[], Any], hooks: Any = (), **more: Any) -> None:
    """Train until the data of one rank end, and compare with one process."""
    watch = Watch()
    train, evaluate = models.specs(kind, max_steps=None, hooks=[watch, *hooks])
    evaluate = evaluate._replace(**more)
    how = "sharded" if more else "rank 0"
    metrics, _ = estimator.train_and_evaluate(make(folder, seed=world.rank()), train, evaluate, evaluation=how)
    assert len(watch.losses) == SHORT
    watch.check_same_as(expected[0], world)
    assert metrics is not None
    assert metrics["global_step"] == SHORT
    for name in ("loss", "mae", "auc"):
        np.testing.assert_allclose(metrics[name], expected[1][name], rtol=1e-5)
    if world.rank() == 0:
        assert tf.train.latest_checkpoint(folder) == str(folder / f"model.ckpt-{SHORT}")


@pytest.mark.parametrize("kind", [one_shot, initializable, queue, sparse], ids=lambda kind: kind.__name__)
def test_data_that_end_early_on_one_rank_end_all(world: Any, folder: Path, expected: Any, kind: Any) -> None:
    run_short(world, folder, expected, lambda: kind(world))


def test_an_iterator_that_a_hook_starts_and_a_sharded_evaluation(world: Any, folder: Path, expected: Any) -> None:
    """The parts of the evaluation are of unequal length, and come as tensors as well."""

    class Start(v1.train.SessionRunHook):  # type: ignore[name-defined]
        iterator: Any = None

        def after_create_session(self, session: Any, coord: Any) -> None:
            session.run(self.iterator.initializer)

    start = Start()

    def input_fn() -> Any:
        start.iterator = v1.data.make_initializable_iterator(part(world))
        return start.iterator.get_next()

    def evaluation_input(input_context: Any) -> Any:
        data = models.eval_input().shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        return v1.data.make_one_shot_iterator(data).get_next()

    run_short(world, folder, expected, input_fn, [start], input_fn=evaluation_input)


def failure(function: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return kind and text of what the function raised, of every rank."""
    mine: Exception | None = None
    try:
        function()
    except Exception as error:
        mine = error
    said: list[tuple[str, str]] = hvd.allgather_object((type(mine).__name__, str(mine)))
    return said


def test_no_batch_on_one_rank(world: Any, folder: Path) -> None:
    def empty() -> Any:
        return v1.data.make_one_shot_iterator(part(world, short=0)).get_next()

    train, evaluate = models.specs(empty)
    for kind, text in failure(lambda: estimator.train_and_evaluate(make(folder), train, evaluate)):
        assert kind == "ConfigurationError"
        assert f"gave no batch on rank(s) {world.size() - 1}" in text


def test_a_reader_that_fails_is_no_end_of_the_data(world: Any, folder: Path) -> None:
    """A queue ends when the thread that fills it has failed; the reason is told on all ranks."""
    last = world.size() - 1

    def input_fn() -> Any:
        def read(row: Any) -> Any:
            if world.rank() == last and row > 20:
                raise ValueError("a broken record")
            return models.X[row], models.Y[row]

        [index] = v1.train.slice_input_producer([tf.range(len(models.X))], shuffle=False)
        x, y = tf.numpy_function(read, [index], [tf.float32, tf.float32])
        x, y = v1.train.batch([tf.ensure_shape(x, [models.WIDTH]), tf.ensure_shape(y, [1])], 6)
        return {"x": x}, y

    train, evaluate = models.specs(input_fn, max_steps=20)
    said = failure(lambda: estimator.train_and_evaluate(make(folder), train, evaluate))
    for rank, (kind, text) in enumerate(said):
        assert "a broken record" in text, said
        assert rank == last or (kind == "MismatchError" and f"rank {last}: failed" in text)
