"""Which part of the input is this rank's, in TensorFlow's words."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdx import world


def input_context() -> Any:
    """Return the `tf.distribute.InputContext` of this rank: one input pipeline a rank.

    An `input_fn(input_context)` shards with it before it shuffles:
    `dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id).shuffle(...)`.
    """
    return tf.distribute.InputContext(
        num_input_pipelines=world.size(), input_pipeline_id=world.rank(), num_replicas_in_sync=world.size()
    )
