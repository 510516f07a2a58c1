"""Iterators of distributed datasets whose replicas are on CPUs: the rows stay on the host, and one plain iterator does.

TensorFlow makes its iterator over several devices there as well, which fetches ahead for each device in threads of its
own. One that is dropped while such a thread fetches at times ends the process with a segmentation fault, or waits for
ever (TensorFlow 2.21, its own strategies too); and Keras 3 drops one after its first batch at the start of every `fit`
and `evaluate`. A plain iterator has none of this, gives the same rows, and is made five times as fast.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import IteratorSpec
from tensorflow.python.distribute import input_lib


def on_host(dataset: Any, devices: Sequence[str]) -> Any:
    """Return a distributed dataset, just made by TensorFlow, with plain iterators where all replicas are on CPUs.

    Args:
        dataset: a DistributedDataset or DistributedDatasetsFromFunction.
        devices: of the replicas.
    """
    if all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in devices):
        cls: Any = type(dataset)
        dataset.__class__ = _class_of(cls)
    return dataset


@functools.cache
def _class_of(cls: Any) -> Any:
    return type(cls)(cls.__name__, (cls,), {"__iter__": _iterate, "__module__": cls.__module__})


def _iterate(dataset: Any) -> Any:
    workers = dataset._input_workers
    parts = getattr(dataset, "_cloned_datasets", None) or dataset._datasets
    iterators = []
    for index, (worker, part) in enumerate(zip(workers.worker_devices, parts, strict=True)):
        with tf.device(worker):
            devices = workers.compute_devices_for_worker(index)
            iterators.append(_HostIterator(part, worker, devices, options=dataset._options, canonicalize_devices=True))
    made = _DistributedHostIterator(
        workers,
        iterators,
        dataset._strategy,
        cardinality=dataset._cardinality,
        enable_get_next_as_optional=dataset._enable_get_next_as_optional,
        options=dataset._options,
        replica_order=getattr(dataset, "_replica_order", None),
    )
    made._element_spec = dataset._element_spec
    return made


class _HostIterator(input_lib._SingleWorkerOwnedDatasetIterator):
    """What is next for each device of a rank is what comes next from one iterator."""

    def _make_iterator(self) -> None:
        with tf.device(self._worker):
            self._iterator = iter(self._dataset)

    def get_next(self, device: str, name: Any = None) -> Any:
        with tf.device(self._worker):
            return self._iterator.get_next()

    def get_next_as_list(self, name: Any = None) -> list[Any]:
        with tf.device(self._worker):
            return [self._iterator.get_next() for _ in self._devices]

    def get_next_as_optional_list(self) -> list[Any]:
        with tf.device(self._worker):
            return [self._iterator.get_next_as_optional() for _ in self._devices]

    @property
    def _type_spec(self) -> Any:
        return _HostIteratorSpec.of(super()._type_spec)


class _HostIteratorSpec(input_lib._SingleWorkerDatasetIteratorSpec):
    """Tells a `tf.function` of what an iterator consists that is given to it."""

    @classmethod
    def of(cls, other: Any) -> Any:
        return cls(*other._serialize())

    @property
    def value_type(self) -> Any:
        return _HostIterator

    @property
    def _component_specs(self) -> list[Any]:
        return [IteratorSpec(element_spec=self._element_spec)]

    def _from_components(self, components: Any) -> Any:
        return _HostIterator(
            worker=self._worker,
            devices=self._devices,
            components=components,
            element_spec=self._element_spec,
            options=self._options,
            canonicalize_devices=self._canonicalize_devices,
        )


class _DistributedHostIterator(input_lib.DistributedIterator):
    """A distributed iterator over such iterators."""

    @property
    def _type_spec(self) -> Any:
        return _DistributedHostIteratorSpec(
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            self._cardinality,
            self._enable_get_next_as_optional,
            self._replica_order,
        )


class _DistributedHostIteratorSpec(input_lib.DistributedIteratorSpec):
    """The same for a distributed one."""

    @property
    def value_type(self) -> Any:
        return _DistributedHostIterator

    @property
    def _component_specs(self) -> list[Any]:
        return [_HostIteratorSpec.of(spec) for spec in super()._component_specs]

    def _from_components(self, components: Any) -> Any:
        made = super()._from_components(components)
        made.__class__ = _DistributedHostIterator
        return made
