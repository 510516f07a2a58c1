"""`hvd.shard`: this rank's part of the data, with equally many steps on every rank."""

from __future__ import annotations

import logging
import sys
from typing import Any

import tensorflow as tf

from hvdx import world
from hvdx.data import arrays, datasets
from hvdx.data.options import ShardOptions
from hvdx.data.plan import ShardPlan
from hvdx.errors import ConfigurationError
from hvdx.logs import log
from hvdx.ops.objects import allgather_object


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    buffer_size: int | None = None,
    drop_remainder: bool = False,
    initial_epoch: int = 0,
) -> tf.data.Dataset:
    """Return this rank's part of `data` as a batched dataset, for `model.fit` or a loop of your own.

    Every sample is used exactly once an epoch over all ranks, and every rank has equally many steps, so no rank waits
    for another at the end of an epoch. The data are sharded before they are shuffled: rank r of N owns the samples r,
    r + N, ..., and shuffles those anew in each epoch, in an order that follows from seed, epoch and rank. Each
    iteration over the dataset is an epoch. Rank 0 says in a line what was done.

    Collective outside graphs (the ranks compare what they got); in a graph, such as an Estimator's input_fn, it is not.

    Args:
        data: arrays of equal length, alone or in tuples, lists and dicts, as `(x, y)` or `({"a": a, "b": b}, y)`; or a
            `tf.data.Dataset` that is the same on every rank and not shuffled.
        batch_size: samples in a batch of one rank. Needed for arrays and for datasets of samples; without it, the
            elements of a dataset are taken for batches and dealt whole.
        shuffle: whether to shuffle; False keeps the order, so that the ranks' batches of a step are together what one
            process would read.
        seed: equal seeds give equal orders; 0 or more.
        buffer_size: elements held in memory to shuffle a dataset; by default all of this rank's, up to 10,000 or
            256 MiB. Arrays are always shuffled as a whole.
        drop_remainder: whether the last samples that do not fill a batch on every rank are left out. Otherwise the last
            batches are smaller, and differ between ranks by one sample at most (the mean over ranks then weighs these
            few samples a little more or less). A dataset of unknown length needs True.
        initial_epoch: the epoch that the first iteration is; what you give `model.fit` as initial_epoch.

    Raises:
        ConfigurationError: data or options cannot be used, or the ranks' data differ in length; says what to do.
        NotInitializedError: `hvd.init()` has not been called.
    """
    options = ShardOptions(
        batch_size, shuffle, seed, buffer_size, drop_remainder, initial_epoch, world.rank(), world.size()
    )
    if isinstance(data, tf.data.Dataset):
        result, count, text = _of_dataset(data, options)
    else:
        result, count, text = _of_arrays(data, options)
    _compare_ranks(data, count, options)
    _say(text, options)
    settings = tf.data.Options()
    settings.deterministic = True
    # It is this rank's part already; a tf.distribute strategy must not take a part of it once more.
    settings.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return result.prefetch(tf.data.AUTOTUNE).with_options(settings)


def _of_arrays(data: Any, options: ShardOptions) -> tuple[tf.data.Dataset, int, str]:
    if options.batch_size is None:
        raise ConfigurationError(
            "hvd.shard needs batch_size, the number of samples in a batch of one rank: "
            "hvd.shard((x, y), batch_size=32)."
        )
    structure = arrays.as_structure(data)
    samples = arrays.number_of_samples(structure)
    plan = ShardPlan(samples, options.size, options.batch_size, options.drop_remainder)
    return arrays.shard_arrays(structure, plan, options), samples, plan.describe()


def _of_dataset(data: tf.data.Dataset, options: ShardOptions) -> tuple[tf.data.Dataset, int, str]:
    count = datasets.number_of_elements(data)
    datasets.check_pipeline(data, options)
    ranks = f"{options.size} rank{'s' if options.size > 1 else ''}"
    if count >= 0 and options.batch_size is not None:
        plan = ShardPlan(count, options.size, options.batch_size, options.drop_remainder)
        return datasets.shard_samples(data, plan, options), count, plan.describe()
    if count >= 0:
        text = f"{count:,} batches over {ranks}: {count // options.size:,} steps an epoch"
        return datasets.shard_batches(data, count, options), count, text
    what = "batches" if options.batch_size is None else f"samples, {options.batch_size:,} a rank and step,"
    if count == tf.data.INFINITE_CARDINALITY:
        return datasets.shard_endless(data, options), count, f"endless {what} over {ranks}"
    text = f"an unknown number of {what} over {ranks}"
    if options.size == 1:
        return datasets.shard_endless(data, options), count, text
    return datasets.shard_unknown(data, options), count, f"{text}; what does not fill a step of all ranks is left out"


def _compare_ranks(data: Any, count: int, options: ShardOptions) -> None:
    """Raise on every rank where they would make different numbers of steps, or deal differently ordered samples."""
    if options.size == 1 or not tf.executing_eagerly():
        return
    mine = {
        "number of samples": {-1: "endless", -2: "unknown"}.get(count, count),
        "batch_size": options.batch_size,
        "drop_remainder": bool(options.drop_remainder),
        "seed of the dataset's own .shuffle()": datasets.shuffle_seeds(data)
        if isinstance(data, tf.data.Dataset)
        else [],
    }
    everyone = allgather_object(mine, name="what the ranks gave hvd.shard")
    for key in mine:
        values = [facts[key] for facts in everyone]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values))
            raise ConfigurationError(
                f"hvd.shard: the {key} differs between ranks: {listed}. Give every rank the whole data, not "
                "shuffled, and the same options; hvd.shard picks each rank's part and shuffles it."
            )


def _say(text: str, options: ShardOptions) -> None:
    """Print the line on rank 0, unless HVDX_LOG=error asks for silence."""
    if options.rank == 0 and log.isEnabledFor(logging.WARNING):
        order = f"shuffled anew each epoch, seed {options.seed}" if options.shuffle else "in the order given"
        print(f"hvdx: {text}; {order}", file=sys.stderr, flush=True)
