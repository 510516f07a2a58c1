"""What an Estimator reads under a mirrored strategy: a batch a device in each step, or the step is not made at all.

TensorFlow fetches the devices' batches one by one. Where the last step finds one for some devices only, the others may
have added theirs to the metrics by then, or not: two evaluations of one model give two results. Here every device
waits until all have a batch, so a result is that of the whole steps. What is left over is told of, where TensorFlow
knows how many batches there are (not of files of records, or what a generator or a filter makes).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdx.logs import log


def whole_steps(input_fn: Callable[[Any], Any], devices: int) -> Callable[[Any], Any]:
    """Return an Estimator's input function that warns where its batches do not fill the last step.

    Args:
        input_fn: takes an InputContext and returns a dataset, or a callable that returns tensors.
        devices: how many batches a step takes.
    """

    def read(context: Any) -> Any:
        result = input_fn(context)
        if isinstance(result, tf.data.Dataset):
            _tell(result, devices)
        return result

    return read


def _tell(dataset: tf.data.Dataset, devices: int) -> None:
    left = _batches(dataset) % devices
    if left:
        log.warning(
            "the batches of the input_fn are no multiple of the %d devices, which take one each in a step: the last %d "
            "are not used. Give a multiple of %d batches",
            devices,
            left,
            devices,
        )


def _batches(dataset: tf.data.Dataset) -> int:
    """Return how many batches a dataset of a bare graph has; 0 where that is not known."""
    try:
        # Without GPUs, whose memory is shared out as the first session that has them says.
        only = tf.compat.v1.ConfigProto(device_count={"GPU": 0, "CPU": _cpus()})
        with tf.compat.v1.Session(config=only) as session:
            return max(0, int(session.run(dataset.cardinality())))
    except tf.errors.OpError:  # it is made from variables, which have no value yet
        return 0


def _cpus() -> int:
    """Return into how many devices the program has divided the CPU, which it may be that nothing has used yet."""
    [processor] = tf.config.list_physical_devices("CPU")
    return len(tf.config.get_logical_device_configuration(processor) or [processor])


def all_or_none(iterator: Any) -> Any:
    """Return an Estimator's iterator, just made by TensorFlow, whose devices get a batch together or not at all."""
    iterator.get_next = functools.partial(_together, iterator.get_next)
    return iterator


def _together(get_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    values = get_next(*args, **kwargs)
    parts = tf.nest.flatten(values, expand_composites=True)
    with tf.control_dependencies([part for part in parts if part is not None]):
        together = [None if part is None else _same(part) for part in parts]
    return tf.nest.pack_sequence_as(values, together, expand_composites=True)


def _same(part: tf.Tensor) -> tf.Tensor:
    with tf.device(part.device):
        return tf.identity(part)
