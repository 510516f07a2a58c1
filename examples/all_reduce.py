"""All-reduce: three ranks hold 1, 2 and -3, and all end with their sum, 0.

    hvdxrun -np 3 python examples/all_reduce.py

Every rank calls the same function with its own number, and gets the sum of all. Training is this with gradients.
Compare point_to_point.py, which does the same by hand.
"""

from __future__ import annotations

import _quiet  # noqa: F401  (first: it imports TensorFlow without its start-up lines)
import tensorflow as tf

import hvdx as hvd

hvd.init()
mine = tf.constant([1.0, 2.0, -3.0][hvd.rank() % 3])
total = hvd.allreduce(mine, op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()} held {mine.numpy():g}, ends with {total.numpy():g}", flush=True)
