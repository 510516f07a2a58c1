"""Several devices in one process, and several such processes: MirroredStrategy, right under Keras 3 as well.

Under Keras 3 the gradients are reduced where the outermost optimizer's `apply` begins; from there on each replica
updates its own components of the variables, with the same numbers. So conditions (accumulation, averages of weights,
the finite test of loss scaling) are as legal in a replica as in a program without a strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, distribute_lib, distribute_utils
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended as _Extended
from tensorflow.python.distribute.values import DistributedValues

from hvdx import world
from hvdx.distribute.batch_norm import averaged_on_reading
from hvdx.distribute.between_ranks import gather, is_mean, own
from hvdx.distribute.cross_device import CrossDeviceOps
from hvdx.distribute.description import Description
from hvdx.distribute.estimator_input import all_or_none, whole_steps
from hvdx.distribute.extended import BetweenRanks
from hvdx.distribute.mirrored_update import reduce_in_replica, update_in_replica
from hvdx.distribute.mirrored_variables import started
from hvdx.distribute.multi_worker import MultiWorkerStrategy
from hvdx.training.under_strategy import are_in_hand, is_building
from hvdx.version import __version__


class _Mirrored:
    """What the strategy of one process and that of several have in common."""

    hvdx_strategy = True
    hvdx_reduces = True
    extended: Any

    def describe(self) -> str:
        """Return which ranks, devices and transport this strategy has resolved to."""
        return str(self.description)

    @property
    def description(self) -> Description:
        """The same in parts."""
        devices = self.extended.worker_devices
        ways = []
        if len(devices) > 1:
            ways.append(f"{self.extended.hvdx_ops.algorithm_on(devices)} between {len(devices)} devices")
        if world.size() > 1:
            ways.append(f"{world.communicator().name} between ranks")
        return Description.of(self, "mirrored", ", ".join(ways) or "none: one replica", f"hvdx {__version__}")


class MirroredStrategy(_Mirrored, tf.distribute.MirroredStrategy):
    """One replica a device of this process.

    Args:
        devices: names of devices of this process.
        ops: how values move between them.

    The global batch is what a dataset's batch is: it is cut among the devices.
    """

    def __init__(self, devices: Sequence[str], ops: CrossDeviceOps) -> None:
        # Past the constructor of the class above, which makes an extended strategy of its own.
        tf.distribute.Strategy.__init__(self, MirroredExtended(self, devices, ops))


class HybridStrategy(_Mirrored, MultiWorkerStrategy):
    """One replica a device of each rank; all ranks have the same number of them, and all replicas train together.

    Args:
        devices: names of devices of this process.
        ops: how values move between devices, and between ranks.

    The global batch is what a dataset's batch is: it is cut among the ranks, and in each among the devices.
    """

    def __init__(self, devices: Sequence[str], ops: CrossDeviceOps) -> None:
        tf.distribute.Strategy.__init__(self, MirroredExtended(self, devices, ops))

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """As `tf.distribute.Strategy.reduce`; collective, but for the mean of scalars over an axis they do not have.

        Keras 3 asks for that mean of what a step returned, and gets the one over this rank's devices.
        """
        parts = self.experimental_local_results(value)
        scalars = all(tf.is_tensor(part) and part.shape.rank == 0 for part in parts)
        if axis is not None and scalars and is_mean(reduce_op):
            return tf.reduce_mean(tf.stack(parts))
        return tf.distribute.Strategy.reduce(self, reduce_op, value, axis)


def mirrored_strategy(devices: Sequence[str], algorithm: str = "auto", bytes_per_pack: int | None = None) -> Any:
    """Return the strategy over these devices of this rank, and those of all other ranks.

    Args:
        devices: names of devices of this process.
        algorithm: how values move between devices; see `CrossDeviceOps`.
        bytes_per_pack: largest fusion buffer; HVDX_FUSION_THRESHOLD where it is None.

    Raises:
        UnsupportedError: NCCL was asked for, and they are not all GPUs.
    """
    ops = CrossDeviceOps(algorithm, bytes_per_pack)
    ops.algorithm_on(devices)
    return (MirroredStrategy if world.size() == 1 else HybridStrategy)(devices, ops)


class MirroredExtended(BetweenRanks, _Extended):
    """What of TensorFlow's mirrored strategy is different."""

    def __init__(self, strategy: Any, devices: Sequence[str], ops: CrossDeviceOps) -> None:
        super().__init__(strategy, devices=list(devices), cross_device_ops=ops)
        self.hvdx_ops = ops
        self._note_ranks()

    # -- updates ---------------------------------------------------------------------------------------------------

    def hvdx_update(self, update: Callable[..., Any], optimizer: Any, gradients: Any, variables: Any) -> Any:
        """Make an optimizer's update in a replica with gradients that are reduced first."""
        return update_in_replica(self, update, optimizer, gradients, variables)

    def hvdx_reduce(self, gradients: Sequence[Any], variables: Sequence[Any], reducer: Any) -> list[Any]:
        """Return gradients of a replica reduced over all of them."""
        return reduce_in_replica(self, gradients, variables, reducer)

    def _use_merge_call(self) -> bool:
        return not are_in_hand()

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if are_in_hand():  # Keras 3 asks again after it has clipped
            return value
        return super()._replica_ctx_all_reduce(reduce_op, value, options)

    # -- who takes part --------------------------------------------------------------------------------------------

    @property
    def _num_replicas_in_sync(self) -> int:
        return len(self._devices) * world.size()

    def _parts_of_batch(self) -> int:
        return self._num_replicas_in_sync

    @property
    def experimental_between_graph(self) -> bool:
        return world.size() > 1

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group - world.rank() * len(self._devices)

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return replica_id + world.rank() * len(self._devices)

    # -- input of Estimators ---------------------------------------------------------------------------------------

    def _make_input_fn_iterator(self, input_fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        read = whole_steps(input_fn, len(self._devices))
        return all_or_none(super()._make_input_fn_iterator(read, *args, **kwargs))

    # -- variables -------------------------------------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        kwargs = averaged_on_reading(kwargs)
        return started(super()._create_variable(next_creator, **kwargs), kwargs)

    # -- values ----------------------------------------------------------------------------------------------------

    def _get_cross_device_ops(self, value: Any) -> CrossDeviceOps:
        return self.hvdx_ops

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        parts = tf.nest.flatten(value)
        if is_building():  # Keras 3 asks for the mean of a batch to see its shapes; the replicas' may differ
            return tf.nest.pack_sequence_as(value, [own(part) for part in parts])
        results = [self._reduced(reduce_op, part, destinations) for part in parts]
        return tf.nest.pack_sequence_as(value, results)

    def _reduced(self, reduce_op: Any, value: Any, destinations: Any) -> Any:
        mean = reduce_op is tf.distribute.ReduceOp.MEAN
        if distribute_utils.is_mirrored(value) and mean:
            return value
        # What is no replica's is a rank's; TensorFlow counts batches so.
        is_of_rank = world.size() > 1 and tf.is_tensor(value)
        if not isinstance(value, DistributedValues) and not is_of_rank:
            return cross_device_ops.reduce_non_distributed_value(
                reduce_op, value, destinations, self._num_replicas_in_sync
            )
        return self.hvdx_ops.reduce(reduce_op, value, destinations)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        if not isinstance(value, DistributedValues):
            return gather(value, axis)
        return self.hvdx_ops._gather(value, destinations, axis)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Sequence[Any], options: Any) -> Any:
        return self.hvdx_ops.batch_reduce(reduce_op, value_destination_pairs)

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        total = self._num_replicas_in_sync
        numbers = [self._get_replica_id_in_sync_group(local) for local in range(len(self._devices))]
        values = [value_fn(distribute_lib.ValueContext(number, total)) for number in numbers]
        return distribute_utils.regroup(values, always_wrap=True)
