"""Checks a Horovod build from inside one of two ranks: usage `horovod_check.py mpi|gloo`, exit code 0 when all is well.

Every number that is compared is computed here from the ranks, so a build that reduces nothing fails.
"""

from __future__ import annotations

import os
import sys

RANKS = 2


def problems(controller: str) -> list[str]:
    """Return what is wrong with this build, one sentence each."""
    import horovod.tensorflow as hvd
    import numpy as np
    import tensorflow as tf

    hvd.init()
    found = []
    if hvd.size() != RANKS:
        found.append(f"the world has {hvd.size()} ranks where {RANKS} were started by {controller}")
    enabled = {"mpi": hvd.mpi_enabled, "gloo": hvd.gloo_enabled}[controller]
    if not enabled():
        found.append(f"{controller} is not what the ranks talk by")
    rank = hvd.rank()
    base = np.arange(1000, dtype=np.float32)
    want = base * sum(r + 1 for r in range(RANKS))

    eager = hvd.allreduce(tf.constant(base * (rank + 1)), op=hvd.Sum, name="check.eager")
    if not np.array_equal(eager.numpy(), want):
        found.append(f"allreduce gave {eager.numpy()[:4]}... for {want[:4]}...")

    @tf.function
    def in_graph(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum, name="check.graph")

    if not np.array_equal(in_graph(tf.constant(base * (rank + 1))).numpy(), want):
        found.append("allreduce inside a tf.function gave another result than the sum")
    gathered = hvd.allgather(tf.fill([rank + 1, 2], float(rank)), name="check.gather").numpy()
    if gathered.shape != (sum(range(1, RANKS + 1)), 2) or gathered.sum() != 2 * sum(r * (r + 1) for r in range(RANKS)):
        found.append(f"allgather gave {gathered.tolist()}")
    hvd.shutdown()
    return found


def main() -> int:
    """Run the check; print one line for each problem."""
    if len(sys.argv) != 2 or sys.argv[1] not in {"mpi", "gloo"}:
        print(f"usage: {sys.argv[0]} mpi|gloo", file=sys.stderr)
        return 2
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    found = problems(sys.argv[1])
    for problem in found:
        print(f"Horovod check ({sys.argv[1]}): {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
