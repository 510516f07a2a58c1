"""What a user may get wrong in a call: hvdx's own error, on every rank, and the ranks stay in step."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.np(2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"compression": "fp16"}, "hvd.Compression.none, fp16 or bf16.*'fp16'"),
        ({"compression": None}, "Received: None"),
        ({"fusion_threshold": "big"}, "number of bytes.*'big'"),
        ({"fusion_threshold": -1}, "number of bytes.*-1"),
        ({"prescale_factor": "2"}, "scale factor is a number.*'2'"),
        ({"names": ["a", "b"]}, "one name a tensor"),
        ({"op": 7}, "no reduce operation 7"),
    ],
)
def test_bad_arguments_of_a_reduction(world: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(world.ConfigurationError, match=text):
        world.grouped_allreduce([tf.ones(3)], **arguments)


@pytest.mark.parametrize("value", [tf.ragged.constant([[1], [2, 3]]), object(), tf.constant("text"), np.array([{}])])
def test_what_is_no_tensor_of_numbers(world: Any, value: Any) -> None:
    for call in (world.allreduce, world.allgather, world.broadcast):
        with pytest.raises(world.UnsupportedError, match="_object"):
            call(value)


def test_variables_are_wanted(world: Any) -> None:
    with pytest.raises(world.ConfigurationError, match=r"variables of TensorFlow or Keras.*1\.0"):
        world.broadcast_variables([1.0])


def test_an_object_that_cannot_be_pickled_is_refused_on_every_rank(world: Any) -> None:
    value = threading.Lock() if world.rank() == 0 else 1
    with pytest.raises(world.ConfigurationError, match="object of rank 0 cannot be pickled"):
        world.broadcast_object(value, 0)
    with pytest.raises(world.ConfigurationError, match="object of rank 0 cannot be pickled"):
        world.allgather_object(value)
    assert world.allgather_object(1) == [1] * world.size()


@pytest.mark.np(2, plain=False)
def test_thresholds_that_differ_between_ranks(world: Any) -> None:
    with pytest.raises(world.MismatchError, match="fusion thresholds differ"):
        world.grouped_allreduce([tf.ones(3)], fusion_threshold=100 + world.rank())
    assert world.allreduce(1.0, world.Sum).numpy() == world.size()


@pytest.mark.np(2, plain=False)
def test_objects_for_different_purposes_do_not_pair(world: Any) -> None:
    with pytest.raises(world.MismatchError, match=r"rank 1: .*the other"):
        world.allgather_object(1, name="one thing" if world.rank() == 0 else "the other")
    assert world.allgather_object(1) == [1] * world.size()


@pytest.mark.np(2, plain=False)
def test_collectives_inside_xla_are_refused(world: Any) -> None:
    for call in (world.allreduce, world.allgather, world.broadcast):
        compiled = tf.function(lambda x, call=call: call(x), jit_compile=True)
        with pytest.raises(world.XlaError, match="jit_compile=False"):
            compiled(tf.ones(3))
