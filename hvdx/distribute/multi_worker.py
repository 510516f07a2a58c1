"""One replica a rank, over any communicator of hvdx: MultiWorkerMirroredStrategy, right under Keras 3 as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute.distribute_utils import (
    VARIABLE_CLASS_MAPPING,
    VARIABLE_POLICY_MAPPING,
    create_mirrored_variable,
    select_replica,
)
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended
from tensorflow.python.distribute.values import DistributedValues, DistributedVariable, PerReplica

from hvdx import world
from hvdx.comm.reduce_op import ReduceOp
from hvdx.distribute.batch_norm import averaged_on_reading
from hvdx.distribute.between_ranks import (
    broadcast_new,
    gather,
    is_aggregated,
    is_mean,
    own,
    reduce_values,
)
from hvdx.distribute.description import Description
from hvdx.distribute.extended import BetweenRanks
from hvdx.training.optimizer import DistributedOptimizer
from hvdx.training.under_strategy import are_in_hand, is_building
from hvdx.version import __version__


class MultiWorkerStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Every rank holds one replica; variables start equal, gradients and values are reduced between ranks.

    It is a `MultiWorkerMirroredStrategy` because every Keras asks for that class where several processes train.

    Args:
        device: where the replica of this rank lives.
        bytes_per_pack: largest fusion buffer; HVDX_FUSION_THRESHOLD where it is None.

    The global batch is what a dataset's batch is: it is cut among the ranks, as `MultiWorkerMirroredStrategy` does it.
    """

    hvdx_strategy = True

    def __init__(self, device: str, bytes_per_pack: int | None = None) -> None:
        # Past the constructor of the class above, which makes an extended strategy of its own.
        tf.distribute.Strategy.__init__(self, MultiWorkerExtended(self, device, bytes_per_pack))

    @property
    def cluster_resolver(self) -> Any:
        """Who this rank is: task type "worker", its rank as task id; the addresses are names only."""
        spec = tf.train.ClusterSpec({"worker": [f"rank-{rank}:0" for rank in range(world.size())]})
        return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=world.rank())

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """As `tf.distribute.Strategy.reduce`; collective, but for the mean of scalars over an axis they do not have.

        Keras 3 asks for that mean of what a step returned. As under tf_keras, a rank keeps its own there: what an epoch
        returns comes from the metrics, which count over all ranks.
        """
        mine = own(value)
        if axis is not None and isinstance(mine, tf.Tensor) and mine.shape.rank == 0 and is_mean(reduce_op):
            return mine
        return super().reduce(reduce_op, value, axis)

    def describe(self) -> str:
        """Return which ranks, devices and transport this strategy has resolved to."""
        return str(self.description)

    @property
    def description(self) -> Description:
        """The same in parts."""
        transport = f"{world.communicator().name} between ranks" if world.size() > 1 else "none: one replica"
        return Description.of(self, "multi_worker", transport, f"hvdx {__version__}")


class MultiWorkerExtended(BetweenRanks, OneDeviceExtended):
    """What of a one-device strategy is different where there are other ranks."""

    def __init__(self, strategy: Any, device: str, bytes_per_pack: int | None) -> None:
        super().__init__(strategy, device)
        self.hvdx_threshold = bytes_per_pack
        self._note_ranks()
        self.experimental_enable_get_next_as_optional = True

    def hvdx_adopt(self, optimizer: Any) -> None:
        """Let an optimizer that is used under this strategy reduce its gradients."""
        # the mean, which in a replica, where losses are divided by the number of replicas, is the sum
        DistributedOptimizer(optimizer, ReduceOp.AVERAGE, fusion_threshold=self.hvdx_threshold)

    # -- who takes part --------------------------------------------------------------------------------------------

    @property
    def _num_replicas_in_sync(self) -> int:
        return world.size()

    @property
    def experimental_between_graph(self) -> bool:
        return True

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group - world.rank()

    # -- variables -------------------------------------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        create = super()._create_variable
        kwargs = averaged_on_reading(kwargs)
        if not is_aggregated(kwargs):
            return broadcast_new(create(next_creator, **kwargs), kwargs)
        # Reduced when it is assigned in a replica; or, as a metric's, when it is read outside of one.
        return create_mirrored_variable(
            self._container_strategy(),
            lambda **given: [broadcast_new(create(next_creator, **given), given)],
            VARIABLE_CLASS_MAPPING,
            VARIABLE_POLICY_MAPPING,
            **kwargs,
        )

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        if isinstance(var, DistributedVariable):  # with one component, which is this rank's
            var, args, kwargs = var.values[0], select_replica(0, args), select_replica(0, kwargs)
        return super()._update(var, fn, args, kwargs, group)

    # -- running ---------------------------------------------------------------------------------------------------

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        context = _ReplicaContext(self._container_strategy(), replica_id_in_sync_group=world.rank())
        with tf.device(self._device), context:
            return fn(*select_replica(0, args), **select_replica(0, kwargs))

    # -- values ----------------------------------------------------------------------------------------------------

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        return self._batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Sequence[Any], options: Any) -> list[Any]:
        given = [value for value, _ in value_destination_pairs]
        parts = tf.nest.flatten(given)
        values = [own(value) for value in parts]
        # Keras 3 asks for the mean of a batch to see its shapes; the ranks' may differ.
        if not (are_in_hand() or (is_building() and isinstance(parts[0], PerReplica))):
            own_size = self.hvdx_threshold is not None
            threshold = self.hvdx_threshold if own_size else getattr(options, "bytes_per_pack", 0) or None
            values = reduce_values(values, reduce_op, threshold)
        results: list[Any] = tf.nest.pack_sequence_as(given, values)
        return results

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return gather(own(value), axis)

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        return tuple(value.values) if isinstance(value, DistributedValues) else (value,)

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        return value_fn(distribute_lib.ValueContext(world.rank(), world.size()))


class _ReplicaContext(distribute_lib.ReplicaContext):
    @property
    def devices(self) -> tuple[str, ...]:
        devices: tuple[str, ...] = self._strategy.extended.worker_devices
        return devices
