"""What every strategy of hvdx does between ranks: new variables, reduced and gathered values, each rank's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.values import DistributedValues

from hvdx import keras_api, world
from hvdx.comm.reduce_op import ReduceOp
from hvdx.errors import ConfigurationError, UnsupportedError
from hvdx.graph import in_bare_graph
from hvdx.ops.allgather import allgather
from hvdx.ops.allreduce import grouped_allreduce
from hvdx.ops.broadcast import broadcast_variables
from hvdx.ops.sparse import allreduce_slices
from hvdx.training.under_strategy import is_alone, start_equal


def is_aggregated(given: Mapping[str, Any]) -> bool:
    """Return whether a variable that is created like this is a sum or mean over ranks when it is read or assigned."""
    return given.get("aggregation") in (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)


def broadcast_new(variable: Any, given: Mapping[str, Any]) -> Any:
    """Return a variable that was just created, with rank 0's value; collective, unless it belongs to a replica.

    Args:
        variable: the new one.
        given: what it was created with.
    """
    per_replica = given.get("synchronization") is tf.VariableSynchronization.ON_READ
    if world.size() == 1 or per_replica or variable.dtype in (tf.string, tf.resource):
        return variable
    if in_bare_graph() and not start_equal():
        raise UnsupportedError(
            f"In a v1 graph a strategy cannot give the ranks' variables the same values ({variable.name} is created "
            "in one, on several ranks). Train an Estimator by hvdx.estimator.train_and_evaluate, which does; in a "
            "session of your own leave out the strategy, wrap the optimizer with hvd.DistributedOptimizer and use "
            "hvd.BroadcastGlobalVariablesHook(0)."
        )
    if not tf.executing_eagerly():
        return variable
    if is_alone():
        return variable
    broadcast_variables([variable], 0)
    place = keras_api.index_of_seed(str(given.get("name") or ""))
    if place is not None:  # or every rank drops the same units
        value = variable.numpy()
        value[place] = keras_api.seed_of_rank(int(value[place]), world.rank())
        variable.assign(value)
    return variable


def is_mean(reduce_op: Any) -> bool:
    """Return whether a reduction is asked for by one of TensorFlow's names for the mean."""
    return reduce_op is tf.distribute.ReduceOp.MEAN or str(reduce_op).upper() == "MEAN"


def own(value: Any) -> Any:
    """Return this rank's value; datasets give theirs in a container even where a rank has one replica."""
    return value.values[0] if isinstance(value, DistributedValues) else value


def reduce_values(values: Sequence[Any], reduce_op: Any, threshold: int | None = None) -> list[Any]:
    """Return the values reduced over all ranks, in one exchange for dense ones; collective."""
    op = ReduceOp.SUM if reduce_op is tf.distribute.ReduceOp.SUM else ReduceOp.AVERAGE
    if world.size() == 1:
        return list(values)
    results = list(values)
    sparse = [index for index, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
    dense = [index for index in range(len(values)) if index not in sparse]
    if dense:
        tensors = [tf.convert_to_tensor(values[index]) for index in dense]
        for index, value in zip(dense, grouped_allreduce(tensors, op, fusion_threshold=threshold), strict=True):
            results[index] = value
    if sparse:
        names = [f"tensor_{index}" for index in sparse]
        slices = allreduce_slices([values[index] for index in sparse], op, names, True, threshold=threshold)
        for index, value in zip(sparse, slices, strict=True):
            results[index] = value
    return results


def gather(value: Any, axis: int) -> Any:
    """Return the ranks' tensors joined along `axis`, in the order of ranks; collective."""
    if world.size() == 1:
        return value
    tensor = tf.convert_to_tensor(value)
    if axis == 0:
        return allgather(tensor)
    if not 0 <= axis < (tensor.shape.rank or 0):
        raise ConfigurationError(
            f"gather(axis=) is from 0 to {(tensor.shape.rank or 0) - 1} for a tensor of shape {tensor.shape}. "
            f"Received: {axis}."
        )
    order = [axis, *(place for place in range(tensor.shape.rank) if place != axis)]
    back = [order.index(place) for place in range(tensor.shape.rank)]
    return tf.transpose(allgather(tf.transpose(tensor, order)), back)


def shards_of(options: Any, what: str) -> None:
    """Check the options of a distributed dataset.

    Raises:
        UnsupportedError: they ask for one dataset a replica.
    """
    mode = getattr(options, "experimental_replication_mode", None)
    if mode is tf.distribute.InputReplicationMode.PER_REPLICA:
        raise UnsupportedError(f"{what} makes one dataset a rank here. Received: InputReplicationMode.PER_REPLICA.")
