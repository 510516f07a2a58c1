"""A tf.data pipeline as this rank's part of it, with equally many steps on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.data.epochs import EpochCounter
from hvdx.data.options import ShardOptions
from hvdx.data.plan import ShardPlan
from hvdx.errors import ConfigurationError

_BUFFER_ELEMENTS = 10_000
_BUFFER_BYTES = 256 << 20
_BUFFER_OF_UNKNOWN_SIZE = {"samples": 1_000, "batches": 32}
"""A shuffle buffer holds its elements in memory; the default is as many as the rank has, within these limits."""
_PASS_THROUGH = ("Prefetch", "Options", "Cache", "Shuffle", "Take", "Skip", "AssertCardinality")
"""Steps of a pipeline whose elements are those of their input."""


def number_of_elements(dataset: tf.data.Dataset) -> int:
    """Return the dataset's length, or tf.data's INFINITE_CARDINALITY or UNKNOWN_CARDINALITY.

    Raises:
        ConfigurationError: called inside a tf.function, where the length is no number yet.
    """
    if tf.executing_eagerly():
        return int(dataset.cardinality())
    graph = tf.compat.v1.get_default_graph()
    if hasattr(graph, "outer_graph"):
        raise ConfigurationError("hvd.shard makes a dataset, so it is called outside tf.function, before the loop.")
    with tf.compat.v1.Session(graph=graph) as session:
        return int(session.run(dataset.cardinality()))


def check_pipeline(dataset: tf.data.Dataset, options: ShardOptions) -> None:
    """Refuse what would lose or repeat samples without anybody noticing.

    Raises:
        ConfigurationError: the ranks would see different orders, or elements are no samples (or no batches).
    """
    batched = _is_batched(dataset)
    if options.batch_size is not None and batched:
        raise ConfigurationError(
            "hvd.shard got batch_size and a dataset that is already batched. Pass the dataset as it is before "
            ".batch(), or leave batch_size out to deal whole batches to the ranks."
        )
    if options.batch_size is None and not batched and _has_scalars(dataset.element_spec):
        raise ConfigurationError(
            "hvd.shard got a dataset of single samples and no batch_size, so the ranks' steps would differ. "
            f"Write hvd.shard(dataset, batch_size=...). Its elements are: {dataset.element_spec}."
        )
    if options.size > 1:
        _check_order(dataset)


def steps_of(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yield the steps of a pipeline, from the last one back to its sources."""
    pending = [dataset]
    while pending:
        node = pending.pop()
        pending.extend(node._inputs())
        yield node


def shuffle_seeds(dataset: tf.data.Dataset) -> list[list[int]]:
    """Return the seeds of the pipeline's own shuffling; the ranks must have the same."""
    found = []
    for node in steps_of(dataset):
        seeds = [tf.get_static_value(getattr(node, name, None)) for name in ("_seed", "_seed2")]
        if "Shuffle" in type(node).__name__ and None not in seeds:
            found.append([int(seed) for seed in seeds])
    return found


def _check_order(dataset: tf.data.Dataset) -> None:
    """Each rank takes every N-th element, so all must see the elements in one order."""
    if [0, 0] in shuffle_seeds(dataset):
        raise ConfigurationError(
            "hvd.shard got a dataset that is already shuffled, without a seed: every rank has another order, so "
            "samples would be lost and repeated. Shard first: remove .shuffle() (and shuffle=True, the default, of "
            "Dataset.list_files) before hvd.shard, which shuffles afterwards."
        )
    for node in steps_of(dataset):
        name = type(node).__name__
        if getattr(node, "_deterministic", None) == "false":
            raise ConfigurationError(
                f"hvd.shard got a dataset with deterministic=False ({name.strip('_')}): every rank may have another "
                "order, so samples would be lost and repeated. Remove it, or do that step after hvd.shard."
            )


def _is_batched(dataset: tf.data.Dataset) -> bool:
    node = dataset
    while any(word in type(node).__name__ for word in _PASS_THROUGH) and node._inputs():
        node = node._inputs()[0]
    return type(node).__name__.endswith("BatchDataset")


def _has_scalars(spec: Any) -> bool:
    return any(getattr(leaf, "shape", None) is not None and leaf.shape.rank == 0 for leaf in tf.nest.flatten(spec))


def shard_samples(dataset: tf.data.Dataset, plan: ShardPlan, options: ShardOptions) -> tf.data.Dataset:
    """Return this rank's batches of a dataset of samples whose length is known."""
    part = dataset.shard(plan.size, options.rank)
    part = _shuffled(part, options, plan.owned(options.rank))
    part = part.batch(plan.batch_size, drop_remainder=plan.drop_remainder)
    if plan.drop_remainder:
        part = part.take(plan.steps)
    elif (sizes := plan.batch_sizes(options.rank)).count(plan.batch_size) < plan.steps - 1:
        part = part.rebatch(tf.constant(sizes, tf.int64))
    return part.apply(tf.data.experimental.assert_cardinality(plan.steps))


def shard_batches(dataset: tf.data.Dataset, elements: int, options: ShardOptions) -> tf.data.Dataset:
    """Return this rank's elements of a dataset of batches whose length is known.

    Raises:
        ConfigurationError: the ranks' numbers of batches would differ.
    """
    steps, left = divmod(elements, options.size)
    drop = f"; or drop_remainder=True, which leaves out {left}" if steps else ""
    if steps == 0 or (left and not options.drop_remainder):
        raise ConfigurationError(
            f"hvd.shard got a dataset of {elements:,} batches for {options.size} ranks: some ranks would have a batch "
            "more than others, and would wait for them. Pass the dataset as it is before .batch(), with "
            f"batch_size=..., and no sample is lost{drop}."
        )
    part = _shuffled(dataset.shard(options.size, options.rank).take(steps), options, steps)
    return part.apply(tf.data.experimental.assert_cardinality(steps))


def shard_endless(dataset: tf.data.Dataset, options: ShardOptions) -> tf.data.Dataset:
    """Return this rank's part of a dataset that never ends, or of any dataset where there is one rank."""
    part = dataset.shard(options.size, options.rank) if options.size > 1 else dataset
    part = _shuffled(part, options)
    return part if options.batch_size is None else part.batch(options.batch_size, options.drop_remainder)


def shard_unknown(dataset: tf.data.Dataset, options: ShardOptions) -> tf.data.Dataset:
    """Return this rank's part of a dataset of unknown length: one element of each whole group of `size` elements.

    Raises:
        ConfigurationError: the rest of the elements may not be dropped.
    """
    if not options.drop_remainder:
        raise ConfigurationError(
            "hvd.shard got a dataset of unknown length (a generator, a filter, TFRecord files), so it cannot give "
            "every rank equally many steps without leaving out the rest. Say drop_remainder=True, which leaves out "
            "what does not fill a batch on every rank at the end of an epoch, or tell the length: "
            "dataset.apply(tf.data.experimental.assert_cardinality(n))."
        )
    # Each element becomes a tuple: the window of a single tensor would be a dataset, that of a tuple several.
    groups = dataset.map(lambda *element: (element,)).window(options.size, drop_remainder=True)

    def mine(window: Any) -> tf.data.Dataset:
        return tf.data.Dataset.zip(window).skip(options.rank).take(1)

    part = groups.flat_map(mine)
    if not isinstance(dataset.element_spec, tuple):
        part = part.map(lambda element: element)
    part = _shuffled(part, options)
    return part if options.batch_size is None else part.batch(options.batch_size, drop_remainder=True)


def buffer_size(dataset: tf.data.Dataset, options: ShardOptions, elements: int | None = None) -> int:
    """Return how many elements are held for shuffling; `elements` is how many the rank has, where that is known."""
    if options.buffer_size is not None:
        return options.buffer_size
    nbytes = 0
    for leaf in tf.nest.flatten(dataset.element_spec):
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", tf.string)
        if shape is None or not shape.is_fully_defined() or dtype in (tf.string, tf.variant, tf.resource):
            limit = _BUFFER_OF_UNKNOWN_SIZE["samples" if options.batch_size is not None else "batches"]
            break
        nbytes += shape.num_elements() * dtype.size
    else:
        limit = min(_BUFFER_ELEMENTS, _BUFFER_BYTES // max(nbytes, 1))
    return max(1, limit if elements is None else min(limit, elements))


def _shuffled(part: tf.data.Dataset, options: ShardOptions, elements: int | None = None) -> tf.data.Dataset:
    """Shuffle anew in each iteration, from seed, epoch and rank alone."""
    if not options.shuffle:
        return part
    size = buffer_size(part, options, elements)
    epochs = EpochCounter(options.initial_epoch)

    def begin() -> np.ndarray:
        state = np.random.SeedSequence(options.random_state(epochs.next())).generate_state(1)
        return (state[0] >> 1).astype(np.int64)

    def of_epoch(_: Any) -> tf.data.Dataset:
        # Of this function's graph alone: the order must not depend on the program's seed, and seed 0 would make
        # TensorFlow compare our seed, a tensor here, with a number.
        tf.random.set_seed(1)
        seed = tf.numpy_function(begin, [], tf.int64, stateful=True)
        seed.set_shape([])
        return part.shuffle(size, seed=seed, reshuffle_each_iteration=False)

    return tf.data.Dataset.from_tensors(0).flat_map(of_epoch)
