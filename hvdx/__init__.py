"""hvdx: Horovod-style distributed training for the TensorFlow and Keras people run now.

import hvdx as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
model.compile(optimizer, loss)
model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

import importlib as _importlib
import importlib.util as _util
import os as _os
import sys as _sys
from typing import TYPE_CHECKING
from typing import Any as _Any

from hvdx.errors import MissingDependencyError as _MissingDependencyError
from hvdx.version import __version__

# The commands hvdxrun and hvdx work without TensorFlow, so that `hvdx doctor` can say what is missing. ("-m" stands in
# argv while Python imports the package of a module it was asked to run.)
_is_command = bool(_sys.argv) and _os.path.basename(_sys.argv[0]) in {"hvdxrun", "hvdx", "-m"}
if not _is_command and _util.find_spec("tensorflow") is None:
    raise _MissingDependencyError(
        "hvdx needs TensorFlow, which is not installed. Choose one: pip install 'hvdx[cpu]' (CPU only, the small "
        "wheel), 'hvdx[tensorflow]' (CPU and GPU), or 'hvdx[gpu]' (with the CUDA libraries)."
    )

if TYPE_CHECKING:
    import keras_callbacks as callbacks
    from hvdx import estimator
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
    from hvdx.estimator.hooks import BroadcastGlobalVariablesHook
    from hvdx.ops.allgather import allgather
    from hvdx.ops.allreduce import Average, Max, Min, Product, Sum, allreduce, grouped_allreduce
    from hvdx.ops.barrier import barrier
    from hvdx.ops.broadcast import broadcast, broadcast_variables
    from hvdx.ops.objects import allgather_object, broadcast_object
    from hvdx.ops.point_to_point import recv, send
    from hvdx.ops.push_pull import push_pull
    from hvdx.training.load import load_model
    from hvdx.training.optimizer import DistributedOptimizer
    from hvdx.training.tape import DistributedGradientTape
    from hvdx.training.v1 import broadcast_global_variables
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

_HOMES = {
    "hvdx.comm.reduce_op": "ReduceOp",
    "hvdx.compression": "Compression",
    "hvdx.data.once_per_host": "once_per_host",
    "hvdx.data.shard": "shard",
    "hvdx.errors": "CheckpointError CollectiveError ConfigurationError GradientError HvdxError LaunchError "
    "MismatchError MissingDependencyError NotInitializedError OptimizerError StallError UnsupportedError "
    "WorldError XlaError",
    "hvdx.estimator.hooks": "BroadcastGlobalVariablesHook",
    "hvdx.ops.allgather": "allgather",
    "hvdx.ops.allreduce": "Average Max Min Product Sum allreduce grouped_allreduce",
    "hvdx.ops.barrier": "barrier",
    "hvdx.ops.broadcast": "broadcast broadcast_variables",
    "hvdx.ops.objects": "allgather_object broadcast_object",
    "hvdx.ops.point_to_point": "recv send",
    "hvdx.ops.push_pull": "push_pull",
    "hvdx.training.load": "load_model",
    "hvdx.training.optimizer": "DistributedOptimizer",
    "hvdx.training.tape": "DistributedGradientTape",
    "hvdx.training.v1": "broadcast_global_variables",
    "hvdx.world": "cross_rank cross_size init is_homogeneous is_initialized local_rank local_size rank shutdown size",
}
_PACKAGES = {"callbacks": "keras_callbacks", "estimator": "hvdx.estimator"}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Average",
    "BroadcastGlobalVariablesHook",
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
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "estimator",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "once_per_host",
    "push_pull",
    "rank",
    "recv",
    "send",
    "shard",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> _Any:
    """Import a public name when it is first used: the launcher must not wait for TensorFlow."""
    if name in _PACKAGES:
        value: _Any = _importlib.import_module(_PACKAGES[name])
    elif name in _HOME:
        value = getattr(_importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'hvdx' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
