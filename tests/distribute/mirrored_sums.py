"""The sums over devices against numpy: every algorithm, several numbers of devices, dtypes, odd sizes, packs."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.distribute_utils import regroup

from hvdx import fusion
from hvdx.distribute.cross_device import ALGORITHMS, CrossDeviceOps
from hvdx.errors import ConfigurationError, UnsupportedError, XlaError
from tests.distribute.mirrored_checks import refused

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
SHAPES = [(), (1,), (7, 3), (0, 4), (2, 3, 5), (1000,)]
DTYPES = [tf.float32, tf.float16, tf.float64, tf.bfloat16, tf.int32, tf.int64, tf.complex64]


def play_sums() -> None:
    """Whole numbers, so that every order of adding gives the same bits."""
    for algorithm, count in itertools.product(("ring", "hierarchical"), (2, 3, 4, 5)):
        for pack in (None, 64):
            ops = CrossDeviceOps(algorithm, pack)
            for function in (_reduced, tf.function(_reduced)):
                if function is not _reduced and (pack is not None or count == 4):
                    continue  # as slow to trace as it is alike
                for op in (SUM, MEAN):
                    _check(function(ops, op, *(places := _devices(count), _given(places))), op, _given(places), places)


def _devices(count: int) -> list[str]:
    return [device.name for device in tf.config.list_logical_devices("CPU")[:count]]


def _given(places: list[str]) -> list[list[Any]]:
    """Return values, each a list with a part a device: dense ones of all kinds, and slices with duplicates."""
    rng = np.random.default_rng(5)
    values = []
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        parts = [_on(place, lambda s=shape, d=dtype: tf.cast(rng.integers(-4, 5, s), d)) for place in places]
        values.append(parts)
    indices = [[3, 0, 3], [1], [], [2, 2], [0, 3]]
    rows = [rng.integers(-4, 5, (len(index), 2)).astype("f") for index in indices]

    def slices(number: int) -> Any:
        indexes = tf.constant(indices[number], tf.int64)
        return tf.IndexedSlices(tf.constant(rows[number]), indexes, tf.constant([5, 2]))

    values.append([_on(place, functools.partial(slices, number)) for number, place in enumerate(places)])
    return values


def _on(place: str, make: Any) -> Any:
    with tf.device(place):
        return make()


def _reduced(ops: CrossDeviceOps, op: Any, places: list[str], values: list[list[Any]]) -> list[Any]:
    grouped = [regroup(tuple(parts), always_wrap=True) for parts in values]
    results = ops.batch_reduce(op, [(value, value) for value in grouped])
    return [result.values for result in results]


def _check(results: list[Any], op: Any, values: list[list[Any]], places: list[str]) -> None:
    for parts, copies in zip(values, results, strict=True):
        dense = [tf.convert_to_tensor(part) for part in parts]
        wide = np.complex128 if dense[0].dtype.is_complex else np.float64
        expected = sum(part.numpy().astype(wide) for part in dense)
        if op is MEAN:
            expected = expected / len(places)
            expected = np.trunc(expected) if dense[0].dtype.is_integer else expected
        assert len(copies) == len(places)
        for copy in copies:
            assert copy.dtype == parts[0].dtype
            if isinstance(copy, tf.IndexedSlices):
                assert len(set(copy.indices.numpy())) == len(copy.indices), "an index stands twice"
            value = tf.convert_to_tensor(copy).numpy().astype(wide)
            np.testing.assert_allclose(value, expected, 1e-2 if dense[0].dtype.size == 2 else 1e-6, err_msg=str(parts))


def play_one_destination() -> None:
    """A value that is wanted on one device lands there, and one that is on one device only gets everywhere."""
    ops = CrossDeviceOps()
    places = _devices(3)
    value = regroup(tuple(_on(place, lambda: tf.constant([1.0, 2.0])) for place in places), always_wrap=True)
    result = ops.reduce(SUM, value, places[1])
    np.testing.assert_array_equal(result, [3.0, 6.0])
    assert result.device.endswith(places[1])
    copies = ops.broadcast(tf.constant(4.0), value).values
    assert [float(copy) for copy in copies] == [4.0] * 3


def play_packs() -> None:
    """As many buffers travel as the plan has, none larger than was asked for but for a value that is itself."""
    places = _devices(2)
    values = [[_on(place, lambda: tf.ones([8])) for place in places] for _ in range(10)]
    for pack in (0, 64, 160, 1 << 20):
        ops = CrossDeviceOps("ring", pack)
        sizes: list[int] = []
        inner = ops._over_devices
        ops._over_devices = lambda b, d, inner=inner, sizes=sizes: sizes.append(b[0].shape[0]) or inner(b, d)  # type: ignore
        _reduced(ops, SUM, places, values)
        plan = fusion.plan([[8]] * 10, [np.dtype("f")] * 10, pack)
        assert len(sizes) == len(plan.buckets)
        assert sum(sizes) == 80
        assert max(sizes) * 4 <= max(pack, 32)


def play_nccl_is_chosen_between_gpus_where_a_mock_stands_for_it() -> None:
    """There is no GPU here: what is chosen is tested, and that between CPUs it is refused."""
    gpus = ["/job:localhost/replica:0/task:0/device:GPU:0", "/job:localhost/replica:0/task:0/device:GPU:1"]
    assert CrossDeviceOps().algorithm_on(gpus) == CrossDeviceOps("nccl").algorithm_on(gpus) == "nccl"
    assert CrossDeviceOps("ring").algorithm_on(gpus) == "ring"
    assert "CPU:1" in refused(UnsupportedError, lambda: CrossDeviceOps("nccl").algorithm_on(_devices(2)))
    from hvdx.distribute import cross_device

    called, real = [], cross_device.nccl_ops.all_sum
    ops = CrossDeviceOps("nccl")
    ops.algorithm_on = lambda devices: "nccl"  # type: ignore[method-assign]
    cross_device.nccl_ops.all_sum = lambda buffers: called.append(buffers) or [tf.add_n(buffers)] * len(buffers)
    try:
        places = _devices(2)
        results = _reduced(ops, SUM, places, [[_on(place, lambda: tf.ones([3])) for place in places]])
    finally:
        cross_device.nccl_ops.all_sum = real
    assert [buffer.shape[0] for [*buffers] in called for buffer in buffers] == [3, 3]
    np.testing.assert_array_equal(results[0][1], [2.0] * 3)


def play_refused() -> None:
    """What has no meaning, and what XLA would swallow."""
    assert "star" in refused(ConfigurationError, lambda: CrossDeviceOps("star"))
    assert "-1" in refused(ConfigurationError, lambda: CrossDeviceOps("ring", -1))
    places = _devices(2)

    @tf.function(jit_compile=True)
    def compiled() -> Any:
        return _reduced(CrossDeviceOps(), SUM, places, [[tf.ones([3]), tf.ones([3])]])

    assert "jit_compile=False" in refused(XlaError, compiled)
    assert set(ALGORITHMS) == {"auto", "ring", "hierarchical", "nccl"}
