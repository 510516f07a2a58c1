"""The strategies of a worker whose optimizers' updates are made by parameter servers, in step with the others or not.

Optimizers that are used under them push their gradients to servers, which update, and pull the parameters. Either way
the batch of a dataset is cut among the workers, as `MultiWorkerMirroredStrategy` does it. Servers hold an optimizer's
variables and slots; the worker's are filled in when `fit` ends, and before Keras, TensorFlow or a callback of hvdx
saves them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute.distribute_utils import select_replica
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from hvdx.distribute.adopt import adapt_keras_2
from hvdx.distribute.between_ranks import broadcast_new, own
from hvdx.distribute.description import Description
from hvdx.distribute.multi_worker import MultiWorkerExtended, MultiWorkerStrategy
from hvdx.distribute.parameter_server.hook import ParameterServerOptimizer, hooked
from hvdx.distribute.parameter_server.options import Options
from hvdx.distribute.server_job import WorkerJob
from hvdx.errors import ConfigurationError
from hvdx.version import __version__


class _Served:
    """What strategies with servers have in common.

    Args:
        job: this worker's part in the job.
        options: how workers and servers train together.
    """

    def __init__(self, job: WorkerJob, options: Options) -> None:
        self.job, self.options = job, options

    def hvdx_adopt(self, optimizer: Any) -> None:
        """Let the servers make the updates of an optimizer."""
        options = self.options
        client = self.job.client(
            updates=options.updates, staleness=options.staleness, gather=options.gather,
            piece_bytes=options.piece_bytes, average=options.updates == "asynchronous",
        )  # fmt: skip
        ParameterServerOptimizer(optimizer, client)

    # -- what the servers hold -------------------------------------------------------------------------------------

    def pull(self, optimizer: Any) -> None:
        """Take over the newest parameters and slots; each worker may call it by itself.

        Args:
            optimizer: one that has made an update under this strategy, or the model that was compiled with it.
        """
        self._served(optimizer).hvdx_fill()

    def save(self, optimizer: Any, path: str | PathLike[str]) -> None:
        """Write everything the servers hold for an optimizer to one file; worker 0 writes, all may call it."""
        self._served(optimizer).hvdx_client.save(path)

    def restore(self, optimizer: Any, path: str | PathLike[str]) -> None:
        """Let servers and workers go on from a file that `save` wrote; all workers call it.

        Args:
            optimizer: the model that was compiled with it, whose weights exist, or one that the servers know already.
            path: of the file; the number of servers may be another than when it was saved.

        Raises:
            CheckpointError: the file cannot be read, or is of another model or optimizer.
        """
        model, inner = optimizer, getattr(optimizer, "optimizer", optimizer)
        if hooked(inner) is None:
            self.hvdx_adopt(inner)
        if "hvdx_variables" not in hooked(inner).__dict__ and model is not inner:
            with self.scope():  # type: ignore[attr-defined]
                hooked(inner).build(model.trainable_variables)
        self._served(optimizer).hvdx_restore(path)

    def counters(self, optimizer: Any) -> list[dict[str, Any]]:
        """Return what each server has counted for an optimizer: pushes, updates, the greatest staleness."""
        found: list[dict[str, Any]] = self._served(optimizer).hvdx_client.stats()
        return found

    def _served(self, optimizer: Any) -> Any:
        found = hooked(getattr(optimizer, "optimizer", optimizer))
        if found is None or "hvdx_variables" not in found.__dict__:
            raise ConfigurationError(
                f"{type(optimizer).__name__} has no variables on the servers yet: it is known to them from its first "
                "update under the strategy on, or from strategy.restore(model, path) on."
            )
        return found

    # -- what it is ------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return which workers, servers, devices and transport this strategy has resolved to."""
        return str(self.description)

    @property
    def description(self) -> Description:
        """The same in parts."""
        options, job = self.options, self.job
        hosts = ", ".join(dict.fromkeys(job.server_hosts))
        words = f"{job.servers} parameter server(s) on {hosts}, {options.updates}"
        if options.updates == "asynchronous":
            bound = "no bound" if options.staleness is None else f"a lead of at most {options.staleness} step(s)"
            words += f", {bound}, {options.gather} gradient(s) an update"
        return Description.of(self, "parameter_server", words, f"hvdx {__version__}")


class SynchronousStrategy(_Served, MultiWorkerStrategy):
    """One replica a worker, all in sync: an update is made of all workers' gradients; the numbers are one process's.

    Values are reduced and gathered between workers, and metrics count over all of them.

    Args:
        job: this worker's part in the job.
        options: how workers and servers train together.
        device: where the replica of this worker lives.
        bytes_per_pack: largest fusion buffer of reduced values; HVDX_FUSION_THRESHOLD where it is None.
    """

    def __init__(self, job: WorkerJob, options: Options, device: str, bytes_per_pack: int | None) -> None:
        _Served.__init__(self, job, options)
        tf.distribute.Strategy.__init__(self, _Synchronous(self, device, bytes_per_pack))


class AsynchronousStrategy(_Served, tf.distribute.OneDeviceStrategy):
    """Each worker is a replica of its own, in sync with none but itself: `num_replicas_in_sync` is 1.

    Nothing is averaged: a loss is that of this worker's part of the batch, a value is not reduced with the others', and
    metrics are a worker's own.

    Args:
        job, options, device: as above.
    """

    # tf_keras and Keras 2 allow loss scaling with some classes only; OneDeviceStrategy is the one that this is like
    hvdx_strategy = True

    def __init__(self, job: WorkerJob, options: Options, device: str) -> None:
        _Served.__init__(self, job, options)
        tf.distribute.Strategy.__init__(self, _Asynchronous(self, device, None))


class _Synchronous(MultiWorkerExtended):
    """Values are reduced between the workers, gradients by the servers."""

    hvdx_has_servers = True

    def hvdx_adopt(self, optimizer: Any) -> None:
        self._container_strategy().hvdx_adopt(optimizer)

    def _scope(self, strategy: Any) -> Any:
        adapt_keras_2()
        return super()._scope(strategy)


class _Asynchronous(_Synchronous):
    """Workers share the first values of variables and the input, and nothing else."""

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1

    def _in_multi_worker_mode(self) -> bool:
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        return broadcast_new(OneDeviceExtended._create_variable(self, next_creator, **kwargs), kwargs)

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return OneDeviceExtended._call_for_each_replica(self, fn, select_replica(0, args), select_replica(0, kwargs))

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Sequence[Any], options: Any) -> list[Any]:
        return [tf.nest.map_structure(own, value) for value, _ in value_destination_pairs]

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return own(value)

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        return value_fn(distribute_lib.ValueContext(0, 1))
