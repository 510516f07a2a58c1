"""What is special to communicators whose payload is a library's own ops: order, mixed ways of calling, disagreement."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdx.comm import first_batch
from hvdx.comm.communicator import Label
from hvdx.comm.reduce_op import ReduceOp
from hvdx.logs import log

pytestmark = pytest.mark.np(2, 3, plain=False, comm=("tensorflow", "horovod"))


def total(world: Any) -> float:
    """Return 1 + 2 + ... + size."""
    return world.size() * (world.size() + 1) / 2


def test_order_holds_in_a_loop_whose_turns_do_not_depend_on_each_other(world: Any) -> None:
    rank, size = world.rank(), world.size()

    @tf.function
    def run(x: Any) -> Any:
        results = tf.TensorArray(tf.float32, 12)
        for i in tf.range(12):
            turn = tf.cast(i, tf.float32)
            summed = world.allreduce(x + turn, world.Sum)
            gathered = world.allgather(tf.fill([rank + 1], turn))
            largest = world.allreduce(x, world.Max)
            results = results.write(i, summed[0] + tf.reduce_sum(gathered) + largest[0])
        return results.stack()

    x = tf.fill([4], float(rank + 1))
    turns = np.arange(12)
    expected = total(world) + size * turns + total(world) * turns + size
    np.testing.assert_allclose(run(x).numpy(), expected)


def test_results_that_nobody_uses_are_exchanged_all_the_same(world: Any) -> None:
    @tf.function
    def run(x: Any) -> Any:
        for i in range(8):
            world.allreduce(x + float(i), world.Sum)
            world.allgather(x)
        return world.allreduce(x, world.Sum)

    for _ in range(5):
        assert run(tf.ones([3])).numpy().tolist() == [world.size()] * 3


def test_ranks_may_call_eagerly_in_a_graph_in_a_loop_or_with_an_open_shape(world: Any) -> None:
    @tf.function
    def loop(x: Any) -> Any:
        for _ in tf.range(3):
            x = world.allreduce(x, world.Sum)
        return x

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.float32)])
    def open_shape(x: Any) -> Any:
        for _ in range(3):
            x = world.allreduce(x, world.Sum)
        return x

    def eager(x: Any) -> Any:
        for _ in range(3):
            x = world.allreduce(x, world.Sum)
        return x

    way = (loop, eager, open_shape)
    for shift in range(3):
        result = way[(world.rank() + shift) % 3](tf.ones([2, 7]))
        assert result.numpy().tolist() == [[world.size() ** 3] * 7] * 2


def test_a_condition_may_differ_in_what_it_computes_but_not_in_what_it_exchanges(world: Any) -> None:
    @tf.function
    def run(flag: Any, x: Any) -> Any:
        return tf.cond(flag, lambda: world.allreduce(x, world.Sum), lambda: world.allreduce(2 * x, world.Sum))

    result = run(tf.constant(world.rank() == 0), tf.ones([2]))
    assert result.numpy().tolist() == [2 * world.size() - 1] * 2


def test_disagreement_is_an_error_on_every_rank_and_the_world_goes_on(world: Any) -> None:
    for _ in range(2):
        with pytest.raises(world.MismatchError, match=r"3 float32.*\n.*rank 1: .*4 float32"):
            world.allreduce(tf.ones([4 if world.rank() == 1 else 3]), name="w")
        assert world.allreduce(tf.ones([3]), world.Sum).numpy().tolist() == [world.size()] * 3


def test_disagreement_in_a_graph_names_the_calls(world: Any) -> None:
    @tf.function
    def run() -> Any:
        return world.allgather(tf.ones([2])) if world.rank() == 1 else world.allreduce(tf.ones([2]))

    with pytest.raises(tf.errors.OpError, match=r"(?s)MismatchError.*rank 1: allgather"):
        run()
    world.barrier()


def test_fusion_thresholds_that_differ_are_named_instead_of_mixing_buffers(world: Any) -> None:
    with pytest.raises(world.MismatchError, match="fusion thresholds differ"):
        world.grouped_allreduce([tf.ones([2]), tf.ones([3])], fusion_threshold=0 if world.rank() == 1 else 1000)
    world.barrier()


def test_small_and_large_thresholds_give_the_same(world: Any) -> None:
    tensors = [tf.range(n, dtype=d) for n, d in [(3, "float32"), (5, "int64"), (1, "float32"), (0, "float32")]]
    for threshold in (0, 64, 1 << 20):
        results = world.grouped_allreduce(tensors, world.Sum, fusion_threshold=threshold)
        for tensor, result in zip(tensors, results, strict=True):
            assert result.numpy().tolist() == (tensor * tf.cast(world.size(), tensor.dtype)).numpy().tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graph", [False, True])
def test_equal_first_batches_are_noticed_once(
    world: Any, graph: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_batch, "_warned", [])
    communicator = world.world.communicator()
    message = f"the same everywhere, in a graph: {graph}, {dtype}"
    label = Label("gradients", ("w",), message)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        for value in (1.0, 1.0, float(world.rank())):

            def call(x: Any) -> Any:
                return communicator.grouped_allreduce([x], ReduceOp.SUM, label, 0)[0]

            (tf.function(call) if graph else call)(tf.cast(tf.fill([3], value), dtype))
        different = Label("gradients", ("w",), "this is never said")
        communicator.grouped_allreduce([tf.fill([3], float(world.rank()))], ReduceOp.SUM, different, 0)
    finally:
        log.removeHandler(handler)
    assert said == [message]


def test_unequal_numbers_of_rows_and_none_at_all(world: Any) -> None:
    for rows in (world.rank(), 0, 1000 + world.rank()):
        for dtype in (tf.float32, tf.uint8, tf.bool, tf.bfloat16, tf.complex128, tf.uint16):
            mine = tf.cast(tf.fill([rows, 3], world.rank() + 1), dtype)
            result = world.allgather(mine)
            counts = world.allgather_object(rows)
            expected = np.concatenate([np.full([n, 3], r + 1) for r, n in enumerate(counts)])
            assert result.dtype == dtype
            assert (
                result.numpy().astype("complex128").tolist()
                == expected.astype("bool" if dtype == tf.bool else "complex128").astype("complex128").tolist()
            )


def test_in_a_graph_of_version_1_with_a_session(world: Any) -> None:
    rank, size = world.rank(), world.size()
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [3])
        summed = world.allreduce(x, world.Sum)
        with tf.control_dependencies([summed]):
            gathered = world.allgather(x)
        with tf.compat.v1.Session() as session:
            for turn in range(3):
                results = session.run([summed, gathered], {x: [rank, turn, 1]})
    assert results[0].tolist() == [size * (size - 1) / 2, 2 * size, size]
    assert results[1].tolist() == [n for r in range(size) for n in (r, 2, 1)]


def test_a_call_in_a_tape_is_not_differentiated_through_the_library(world: Any) -> None:
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(world.allreduce(x * x, world.Sum))
    assert tape.gradient(y, x).numpy().tolist() == [2 * world.size(), 4 * world.size()]


def test_send_and_recv_are_refused_by_name(world: Any) -> None:
    name = world.world.communicator().name
    with pytest.raises(world.UnsupportedError, match=f"{name} communicator has no send.*mpi"):
        world.send(tf.ones([1]), (world.rank() + 1) % world.size())
    with pytest.raises(world.UnsupportedError, match=f"{name} communicator has no recv"):
        world.recv(tf.TensorSpec([1]), (world.rank() + 1) % world.size())


def test_tf_config_is_as_it_was(world: Any) -> None:
    assert "TF_CONFIG" not in os.environ
