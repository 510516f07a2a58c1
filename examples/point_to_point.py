"""Point to point: three ranks hold 1, 2 and -3; rank 0 collects the numbers, adds, and sends the sum, 0, to the others.

    hvdxrun -np 3 python examples/point_to_point.py

A message has one sender and one receiver, and both say so: each `send` here meets the `recv` that names its rank. What
takes 2 (N - 1) messages through one rank, one after the other, is a single call in all_reduce.py.
"""

from __future__ import annotations

import _quiet  # noqa: F401  (first: it imports TensorFlow without its start-up lines)
import tensorflow as tf

import hvdx as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
others = range(1, size)
mine = tf.constant([1.0, 2.0, -3.0][rank % 3])
if rank == 0:
    total = mine
    for source in others:
        total += hvd.recv(like=mine, source=source)
    for destination in others:
        hvd.send(total, destination=destination)
else:
    hvd.send(mine, destination=0)
    total = hvd.recv(like=mine, source=0)
print(f"rank {rank} of {size} held {mine.numpy():g}, ends with {total.numpy():g}", flush=True)
