"""hvdx: Horovod-style distributed training for the TensorFlow and Keras people run now.

import hvdx as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
model.compile(optimizer, loss)
model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

import importlib.util as _util

from hvdx.errors import MissingDependencyError as _MissingDependencyError
from hvdx.version import __version__

if _util.find_spec("tensorflow") is None:
    raise _MissingDependencyError(
        "hvdx needs TensorFlow, which is not installed. Choose one: pip install 'hvdx[cpu]' (CPU only, the small wheel), "
        "'hvdx[tensorflow]' (CPU and GPU), or 'hvdx[gpu]' (with the CUDA libraries)."
    )

import keras_callbacks as callbacks
from hvdx.comm.reduce_op import ReduceOp
from hvdx.compression import Compression
from hvdx.data.once_per_host import once_per_host
from hvdx.data.shard import shard
from hvdx.errors import (
    CheckpointError,
    CollectiveError,
    ConfigurationError,
    GradientError,
    HvdxError,
    LaunchError,
    MismatchError,
    MissingDependencyError,
    NotInitializedError,
    OptimizerError,
    StallError,
    UnsupportedError,
    WorldError,
    XlaError,
)
from hvdx.ops.allgather import allgather
from hvdx.ops.allreduce import Average, Max, Min, Product, Sum, allreduce, grouped_allreduce
from hvdx.ops.barrier import barrier
from hvdx.ops.broadcast import broadcast, broadcast_variables
from hvdx.ops.objects import allgather_object, broadcast_object
from hvdx.ops.point_to_point import recv, send
from hvdx.training.optimizer import DistributedOptimizer
from hvdx.training.tape import DistributedGradientTape
from hvdx.world import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Average",
    "CheckpointError",
    "CollectiveError",
    "Compression",
    "ConfigurationError",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "GradientError",
    "HvdxError",
    "LaunchError",
    "Max",
    "Min",
    "MismatchError",
    "MissingDependencyError",
    "NotInitializedError",
    "OptimizerError",
    "Product",
    "ReduceOp",
    "StallError",
    "Sum",
    "UnsupportedError",
    "WorldError",
    "XlaError",
    "__version__",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "once_per_host",
    "rank",
    "recv",
    "send",
    "shard",
    "shutdown",
    "size",
]
