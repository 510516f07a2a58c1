"""hvd.shard on several ranks and on one: each sample once, equally many steps, another order every epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx.data import epochs

pytestmark = [pytest.mark.np(2, 3), pytest.mark.usefixtures("world")]
SAMPLES = 23


def values(samples: int = SAMPLES) -> np.ndarray:
    """Return samples that tell their index."""
    return np.arange(samples, dtype=np.float32)


SOURCES: dict[str, Callable[[], Any]] = {
    "arrays": values,
    "dataset": lambda: tf.data.Dataset.from_tensor_slices(values()),
    "asserted length": lambda: tf.data.Dataset.from_generator(
        lambda: iter(values()), output_signature=tf.TensorSpec((), tf.float32)
    ).apply(tf.data.experimental.assert_cardinality(SAMPLES)),
}


def epoch(dataset: tf.data.Dataset) -> list[list[float]]:
    """Return the batches of one epoch."""
    return [batch.numpy().tolist() for batch in dataset]


def of_all_ranks(batches: list[list[float]]) -> list[list[list[float]]]:
    """Return every rank's batches."""
    return hvd.allgather_object(batches)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("batch_size", [2, 4, 7, 100])
def test_each_sample_once_and_a_new_order_every_epoch(source: str, batch_size: int) -> None:
    dataset = hvd.shard(SOURCES[source](), batch_size, seed=3)
    seen = [of_all_ranks(epoch(dataset)) for _ in range(3)]
    for ranks in seen:
        assert sorted(v for batches in ranks for batch in batches for v in batch) == values().tolist()
        assert {len(batches) for batches in ranks} == {int(dataset.cardinality())}
        assert all(1 <= len(batch) <= batch_size for batches in ranks for batch in batches)
    flat = [[v for batch in ranks[hvd.rank()] for v in batch] for ranks in seen]
    assert flat[0] != flat[1] != flat[2] != flat[0]
    assert sorted(flat[0]) == sorted(flat[1]), "a rank keeps its samples, so nothing depends on equal shuffling"
    assert flat[0] != sorted(flat[0])


@pytest.mark.parametrize("source", SOURCES)
def test_the_order_follows_from_seed_and_epoch(source: str) -> None:
    tf.random.set_seed(0)
    first = hvd.shard(SOURCES[source](), 4, seed=3)
    orders = [epoch(first) for _ in range(3)]
    tf.random.set_seed(1)
    again = hvd.shard(SOURCES[source](), 4, seed=3, initial_epoch=1)
    assert [epoch(again), epoch(again)] == orders[1:]
    assert epoch(hvd.shard(SOURCES[source](), 4, seed=4)) != orders[0]


@pytest.mark.parametrize("source", SOURCES)
def test_a_resumed_training_reads_what_the_uninterrupted_one_would(source: str) -> None:
    first = hvd.shard(SOURCES[source](), 4, seed=3)
    orders = [epoch(first) for _ in range(4)]
    again = hvd.shard(SOURCES[source](), 4, seed=3)
    epochs.skip_to(2)
    assert [epoch(again), epoch(again)] == orders[2:]
    epochs.skip_to(1)
    assert epoch(again) not in orders, "an epoch that is past does not come again"


@pytest.mark.parametrize("source", SOURCES)
def test_without_shuffling_a_step_reads_what_one_process_would(source: str) -> None:
    per_rank = 2
    dataset = hvd.shard(SOURCES[source](), per_rank, shuffle=False)
    for step, batches in enumerate(list(zip(*of_all_ranks(epoch(dataset)), strict=True))[:-2]):
        start = step * per_rank * hvd.size()
        assert sorted(v for batch in batches for v in batch) == values()[start : start + per_rank * hvd.size()].tolist()


@pytest.mark.parametrize("source", SOURCES)
def test_drop_remainder_gives_full_batches_of_static_shape(source: str) -> None:
    dataset = hvd.shard(SOURCES[source](), 3, drop_remainder=True)
    assert dataset.element_spec.shape == (3,)
    batches = epoch(dataset)
    assert len(batches) == SAMPLES // (3 * hvd.size()) == int(dataset.cardinality())
    seen = [v for ranks in of_all_ranks(batches) for batch in ranks for v in batch]
    assert len(seen) == len(set(seen))


def test_structures_keep_their_form() -> None:
    x, label = np.arange(24).reshape(12, 2), np.array(list("abcdefghijkl"))
    dataset = hvd.shard(({"x": x, "again": [x, x]}, label), 2)
    for features, labels in dataset:
        assert isinstance(features["again"], tuple)
        np.testing.assert_array_equal(features["x"], features["again"][1])
        rows = features["x"].numpy()[:, 0] // 2
        assert labels.numpy().tolist() == [label[row].encode() for row in rows]
    assert dataset.element_spec[0]["x"].shape.as_list() == [None, 2]


def test_memory_mapped_arrays(tmp_path: Any) -> None:
    path = tmp_path / "x.npy"
    np.save(path, values())
    batches = of_all_ranks(epoch(hvd.shard(np.load(path, mmap_mode="r"), 4)))
    assert sorted(v for ranks in batches for batch in ranks for v in batch) == values().tolist()


def unknown_length(samples: int = SAMPLES) -> tf.data.Dataset:
    """Return a dataset that does not know its length."""
    return tf.data.Dataset.from_tensor_slices({"v": values(samples)}).filter(lambda element: element["v"] >= 0)


@pytest.mark.parametrize("samples", [20, 23, 24])
def test_unknown_length_gives_equally_many_steps(samples: int) -> None:
    dataset = hvd.shard(unknown_length(samples), 2, drop_remainder=True)
    batches = of_all_ranks([batch["v"].numpy().tolist() for batch in dataset])
    steps = samples // (2 * hvd.size())
    seen = [v for ranks in batches for batch in ranks for v in batch]
    assert {len(ranks) for ranks in batches} == {steps}
    assert len(set(seen)) == len(seen) == steps * 2 * hvd.size()


def test_unknown_length_must_be_allowed_to_drop() -> None:
    if hvd.size() == 1:
        assert sum(len(batch["v"]) for batch in hvd.shard(unknown_length(), 2)) == SAMPLES
        return
    with pytest.raises(hvd.ConfigurationError, match=r"unknown length.*drop_remainder=True.*assert_cardinality"):
        hvd.shard(unknown_length(), 2)


def test_whole_batches() -> None:
    batched = tf.data.Dataset.from_tensor_slices(values(2 * 6 * hvd.size())).batch(2)
    batches = of_all_ranks(epoch(hvd.shard(batched)))
    assert {len(ranks) for ranks in batches} == {6}
    assert sorted(v for ranks in batches for batch in ranks for v in batch) == values(2 * 6 * hvd.size()).tolist()
    if hvd.size() > 1:
        uneven = tf.data.Dataset.from_tensor_slices(values(2 * (6 * hvd.size() + 1))).batch(2)
        with pytest.raises(hvd.ConfigurationError, match=r"a batch more than others.*before \.batch"):
            hvd.shard(uneven)
        assert len(epoch(hvd.shard(uneven, drop_remainder=True))) == 6


def test_endless() -> None:
    endless = tf.data.Dataset.from_tensor_slices(values(6)).repeat()
    dataset = hvd.shard(endless, 2, shuffle=False)
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    batches = of_all_ranks([batch.numpy().tolist() for batch in dataset.take(3)])
    assert sorted(v for ranks in batches for batch in ranks for v in batch) == sorted(
        v % 6 for v in range(6 * hvd.size())
    )


def test_a_cache_before_it_is_filled_once() -> None:
    calls = []

    def count(value: np.ndarray) -> np.ndarray:
        calls.append(1)
        return value

    source = values(12)
    cached = tf.data.Dataset.from_tensor_slices(source).map(lambda v: tf.numpy_function(count, [v], tf.float32)).cache()
    dataset = hvd.shard(cached, 2)
    for _ in range(3):
        epoch(dataset)
    assert len(calls) == len(source)


def test_in_a_graph_it_needs_no_other_rank() -> None:
    """As in an Estimator's input_fn: rank 0 alone makes and reads its part."""
    expected = [epoch(hvd.shard(source(), 4, seed=5)) for source in SOURCES.values()]
    if hvd.rank() == 0:
        for source, batches in zip(SOURCES.values(), expected, strict=True):
            with tf.Graph().as_default():
                iterator = tf.compat.v1.data.make_initializable_iterator(hvd.shard(source(), 4, seed=5))
                following = iterator.get_next()
                with tf.compat.v1.Session() as session:
                    session.run(iterator.initializer)
                    assert [session.run(following).tolist() for _ in batches] == batches
    hvd.barrier()


def test_fit_counts_the_steps(keras: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x = values()[:, None] / SAMPLES
    data = hvd.shard((x, 2 * x), 4)
    said = capsys.readouterr().err
    steps: list[int] = []
    counter = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    model.fit(data, epochs=2, verbose=0, callbacks=[counter], validation_data=hvd.shard((x, 2 * x), 4, shuffle=False))
    assert steps == 2 * list(range(int(data.cardinality())))
    if hvd.rank() == 0:
        assert f"hvdx: 23 samples over {hvd.size()} rank" in said
        assert "shuffled anew each epoch, seed 0" in said
    else:
        assert said == ""


def test_silence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from hvdx import logs

    monkeypatch.setenv("HVDX_LOG", "error")
    logs.configure(hvd.rank())
    try:
        hvd.shard(values(), 4)
        assert capsys.readouterr().err == ""
    finally:
        monkeypatch.undo()
        logs.configure(hvd.rank())
