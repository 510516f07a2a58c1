"""Sums over the devices of one process, in fusion buffers; between devices and ranks, where there are several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, distribute_utils
from tensorflow.python.distribute.values import Mirrored
from tensorflow.python.ops import nccl_ops

from hvdx import environment, fusion, world
from hvdx.comm.dtypes import numpy_dtype
from hvdx.distribute.between_ranks import gather, reduce_values
from hvdx.errors import ConfigurationError, UnsupportedError
from hvdx.ops.sparse import deduplicate
from hvdx.ops.xla import refuse_inside_xla

ALGORITHMS = ("auto", "ring", "hierarchical", "nccl")
"""Ways over several devices; "auto" is NCCL between GPUs, else the ring."""
_GROUP = 4
"""Devices that "hierarchical" sums up on one of them, before it sums up those."""

Between = Callable[[list[Any]], list[Any]]
"""Makes the sums of this process's devices, one a value, the sums of all ranks; collective."""


class CrossDeviceOps(tf.distribute.CrossDeviceOps):
    """Sums and means over the devices of this process and all ranks; every device gets the same bits.

    Dense floating-point values that go to as many devices as they come from travel packed by dtype. IndexedSlices
    become slices with every index once. All else, and what goes to one device, is summed up on one device.

    Args:
        algorithm: "ring" (each device reduces a part of a buffer, then the parts go round), "hierarchical" (sums within
            groups of devices, then of the groups, then copies), "nccl" (TensorFlow's operation; GPUs only), or "auto".
        bytes_per_pack: largest fusion buffer; HVDX_FUSION_THRESHOLD where it is None.

    Raises:
        ConfigurationError: there is no such algorithm, or no such size.
    """

    def __init__(self, algorithm: str = "auto", bytes_per_pack: int | None = None) -> None:
        super().__init__()
        if algorithm not in ALGORITHMS:
            raise ConfigurationError(f"algorithm= is one of {', '.join(ALGORITHMS)}. Received: {algorithm!r}.")
        environment.check_threshold(bytes_per_pack)
        self.algorithm = algorithm
        self.threshold = bytes_per_pack

    def algorithm_on(self, devices: Sequence[str]) -> str:
        """Return which algorithm these devices get.

        Raises:
            UnsupportedError: NCCL was asked for, and they are not all GPUs.
        """
        others = [device for device in devices if ":GPU:" not in device.upper()]
        if self.algorithm == "nccl" and others:
            raise UnsupportedError(
                f"NCCL moves values between GPUs only, and {', '.join(others)} is none. Choose the algorithm "
                '"ring" or "hierarchical", or "auto".'
            )
        if self.algorithm == "auto":
            return "ring" if others else "nccl"
        return self.algorithm

    def sums(self, values: Sequence[Sequence[Any]], targets: Sequence[Sequence[str]], between: Between | None) -> Any:
        """Return for each value its sum, once a device.

        Args:
            values: each a tensor, or IndexedSlices, a replica.
            targets: for each value, on which devices its sum is needed.
            between: what the ranks do with the sums, where there are several.

        Raises:
            XlaError: inside a function compiled by XLA.
        """
        refuse_inside_xla(max(map(len, values), default=1))
        results: list[Any] = [None] * len(values)
        alike: dict[tuple[str, ...], list[int]] = {}
        for index, (parts, devices) in enumerate(zip(values, targets, strict=True)):
            if _fits_a_buffer(parts, devices):
                alike.setdefault(tuple(devices), []).append(index)
            else:
                results[index] = [_total(parts, devices[0])]
        for devices, indexes in alike.items():
            sums = self._packed_sums([values[index] for index in indexes], devices)
            for index, copies in zip(indexes, sums, strict=True):
                results[index] = copies
        if between is not None:
            results = [[total] for total in between([copies[0] for copies in results])]
        pairs = zip(results, targets, strict=True)
        return [copies if len(copies) == len(target) else _copies(copies[0], target) for copies, target in pairs]

    # -- what TensorFlow calls -------------------------------------------------------------------------------------

    @property
    def _num_between_graph_workers(self) -> int:
        return world.size() if world.is_initialized() else 1

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """Return one value reduced, where `destinations` says."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """Return the values reduced, each where its destination says."""
        values = [value.values for value, _ in value_destination_pairs]
        targets = [cross_device_ops.get_devices_from(destination) for _, destination in value_destination_pairs]
        ranks = self._num_between_graph_workers
        sums = self.sums(values, targets, self._between_ranks if ranks > 1 else None)
        if reduce_op is tf.distribute.ReduceOp.MEAN:
            counts = [len(parts) * ranks for parts in values]
            sums = [[divided(part, count) for part in parts] for parts, count in zip(sums, counts, strict=True)]
        return [regrouped(parts) for parts in sums]

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: Any) -> Any:
        devices = cross_device_ops.get_devices_from(destinations)
        with tf.device(devices[0]):
            joined = tf.concat(list(per_replica_value.values), axis)
        return regrouped(_copies(gather(joined, axis) if self._num_between_graph_workers > 1 else joined, devices))

    # -- the steps -------------------------------------------------------------------------------------------------

    def _between_ranks(self, tensors: list[Any]) -> list[Any]:
        return reduce_values(tensors, tf.distribute.ReduceOp.SUM, self.threshold)

    def _packed_sums(self, values: Sequence[Sequence[Any]], devices: tuple[str, ...]) -> list[list[Any]]:
        """Return the sum of each value on each device, by way of fusion buffers."""
        firsts = [parts[0] for parts in values]
        limit = environment.FUSION_THRESHOLD.read() if self.threshold is None else self.threshold
        plan = fusion.plan([first.shape.as_list() for first in firsts], [numpy_dtype(v) for v in firsts], limit)
        results: list[list[Any]] = [[] for _ in values]
        for bucket in plan.buckets:
            buffers = []
            for number, device in enumerate(devices):
                with tf.device(device):
                    parts = [tf.reshape(values[slot.index][number], [-1]) for slot in bucket.slots]
                    buffers.append(tf.concat(parts, 0))
            for buffer, device in zip(self._over_devices(buffers, devices), devices, strict=True):
                with tf.device(device):
                    pieces = tf.split(buffer, [tf.TensorShape(slot.shape).num_elements() for slot in bucket.slots])
                    for piece, slot in zip(pieces, bucket.slots, strict=True):
                        results[slot.index].append(tf.reshape(piece, slot.shape))
        return results

    def _over_devices(self, buffers: list[Any], devices: Sequence[str]) -> list[Any]:
        """Return the sum of one buffer a device, on each device."""
        algorithm = self.algorithm_on(devices)
        if algorithm == "nccl":
            return list(nccl_ops.all_sum(buffers))
        return (_ring if algorithm == "ring" else _hierarchical)(buffers, devices)


def regrouped(parts: Sequence[Any]) -> Any:
    """Return equal values, one a device, as TensorFlow's strategies pass them on."""
    return parts[0] if len(parts) == 1 else distribute_utils.regroup(tuple(parts), wrap_class=Mirrored)


def _fits_a_buffer(parts: Sequence[Any], devices: Sequence[str]) -> bool:
    first = parts[0]
    return (
        len(parts) == len(set(devices)) > 1
        and isinstance(first, tf.Tensor)
        and (first.dtype.is_floating or first.dtype.is_complex)
        and first.shape.is_fully_defined()
        and all(isinstance(part, tf.Tensor) and part.shape == first.shape for part in parts)
    )


def _total(parts: Sequence[Any], device: str) -> Any:
    """Return the sum of a value's parts on one device."""
    with tf.device(device):
        if isinstance(parts[0], tf.IndexedSlices):
            rows = tf.concat([part.values for part in parts], 0)
            indices = tf.concat([part.indices for part in parts], 0)
            return deduplicate(tf.IndexedSlices(rows, indices, parts[0].dense_shape))
        total = tf.convert_to_tensor(parts[0])
        for part in parts[1:]:
            total = total + tf.convert_to_tensor(part)
        return tf.identity(total)


def divided(value: Any, count: int) -> Any:
    """Return a tensor, or slices, divided; integers stay integers."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(divided(value.values, count), value.indices, value.dense_shape)
    number = tf.cast(count, value.dtype)
    return tf.truncatediv(value, number) if value.dtype.is_integer else value / number


def _copies(value: Any, devices: Sequence[str]) -> list[Any]:
    """Return one copy of a tensor, or of slices, a device."""
    copies = []
    for device in devices:
        with tf.device(device):
            copies.append(tf.nest.map_structure(tf.identity, value, expand_composites=True))
    return copies


def _ring(buffers: list[Any], devices: Sequence[str]) -> list[Any]:
    """Reduce-scatter, then all-gather: each part goes once round the devices, and its sum once round from there."""
    count, length = len(devices), buffers[0].shape[0]
    sizes = [length // count + (number < length % count) for number in range(count)]
    parts = []
    for buffer, device in zip(buffers, devices, strict=True):
        with tf.device(device):
            parts.append(tf.split(buffer, sizes))
    arrived: list[list[Any]] = [[None] * count for _ in devices]
    for part in range(count):
        place = (part + 1) % count
        total = parts[place][part]
        for _ in range(count - 1):
            place = (place + 1) % count
            with tf.device(devices[place]):
                total = total + parts[place][part]
        arrived[place][part] = total
        for _ in range(count - 1):
            place = (place + 1) % count
            with tf.device(devices[place]):
                total = tf.identity(total)
            arrived[place][part] = total
    results = []
    for pieces, device in zip(arrived, devices, strict=True):
        with tf.device(device):
            results.append(tf.concat(pieces, 0))
    return results


def _hierarchical(buffers: list[Any], devices: Sequence[str]) -> list[Any]:
    """Sum up groups of devices on their first ones, those on the first of all, and copy back the same way."""
    leaders = range(0, len(devices), _GROUP)
    sums = [_sum_on(devices[first], buffers[first : first + _GROUP]) for first in leaders]
    totals = _copies(_sum_on(devices[0], sums), [devices[first] for first in leaders])
    results: list[Any] = []
    for total, first in zip(totals, leaders, strict=True):
        results += _copies(total, devices[first : first + _GROUP])
    return results


def _sum_on(device: str, tensors: Sequence[Any]) -> Any:
    with tf.device(device):
        return tf.add_n(list(tensors))
