"""All-reduce in five ways: each file has one algorithm, the bytes it sends, and what it costs.

The algorithms know numpy and a `Channel` (`channel.py`), nothing of MPI or TensorFlow. `over_mpi.py` puts them on MPI
and chooses one; docs/all-reduce.md explains them.
"""

from __future__ import annotations

from types import ModuleType

from hvdx.comm.algorithms import halving_doubling, hierarchical, recursive_doubling, ring, tree

ALGORITHMS: dict[str, ModuleType] = {
    "ring": ring,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "tree": tree,
    "hierarchical": hierarchical,
}
"""Each has all_reduce(buffer, op, channel), bytes_sent(rank, hosts, count, itemsize) and seconds(cluster, nbytes)."""
