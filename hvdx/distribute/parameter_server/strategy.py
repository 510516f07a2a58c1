"""The strategy of a worker whose optimizers' updates are made by parameter servers, in step with the others or not."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import input_util
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from hvdx import world
from hvdx.distribute.between_ranks import broadcast_new, shards_of
from hvdx.distribute.description import Description
from hvdx.distribute.multi_worker import MultiWorkerExtended
from hvdx.distribute.parameter_server.hook import ParameterServerOptimizer, hooked
from hvdx.distribute.parameter_server.options import Options
from hvdx.distribute.parameter_server.placement import PIECE_BYTES
from hvdx.distribute.server_job import WorkerJob
from hvdx.errors import ConfigurationError
from hvdx.version import __version__


class ParameterServerStrategy(tf.distribute.OneDeviceStrategy):
    """Optimizers that are used under it push their gradients to servers, which update, and pull the parameters.

    Synchronous: one replica a worker, all in sync; every update is made of the gradients of all workers, so that the
    numbers are those of one process, and values are reduced and gathered between workers. Asynchronous: each worker is
    a replica of its own, and one is in sync (`num_replicas_in_sync` is 1): nothing is averaged, a loss is that of one
    worker's batch, and each worker's metrics are its own. Either way each worker reads its share of a distributed
    dataset (what `fit` and `evaluate` are given), whose batch is that of all replicas in sync.

    A server holds an optimizer's variables and slots. The worker's are filled in when `fit` ends and before Keras or a
    callback of hvdx saves them; `pull` does it at any time.

    Args:
        job: this worker's part in the job.
        device: where the replica of this worker lives.
        bytes_per_pack: largest fusion buffer of reduced values; HVDX_FUSION_THRESHOLD where it is None.
        updates, staleness, gather, piece_bytes: see `ParameterClient`.
    """

    hvdx_strategy = True

    def __init__(
        self,
        job: WorkerJob,
        device: str,
        bytes_per_pack: int | None = None,
        *,
        updates: str = "synchronous",
        staleness: int | None = None,
        gather: int = 1,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        # raises here, and not in the first step, what a client would refuse
        self.options = Options(updates, job.workers, job.servers, staleness, gather, piece_bytes)
        self.job = job
        synchronous = updates == "synchronous"
        extended = _Synchronous(self, device, bytes_per_pack) if synchronous else _Asynchronous(self, device)
        # tf_keras and Keras 2 allow loss scaling with some classes only; OneDeviceStrategy is the one that this is like
        tf.distribute.Strategy.__init__(self, extended)

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
            with self.scope():
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


class _Synchronous(MultiWorkerExtended):
    """All workers' replicas are in sync: values are reduced between them, gradients by the servers."""

    hvdx_adopts_keras_2 = True

    def hvdx_adopt(self, optimizer: Any) -> None:
        self._container_strategy().hvdx_adopt(optimizer)


class _Asynchronous(OneDeviceExtended):
    """This worker's replica is in sync with none but itself; workers share the first values and the input."""

    hvdx_adopts_keras_2 = True

    def hvdx_adopt(self, optimizer: Any) -> None:
        self._container_strategy().hvdx_adopt(optimizer)

    @property
    def experimental_between_graph(self) -> bool:
        return True

    @property
    def should_checkpoint(self) -> bool:
        return world.rank() == 0

    @property
    def should_save_summary(self) -> bool:
        return world.rank() == 0

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        return broadcast_new(super()._create_variable(next_creator, **kwargs), kwargs)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        shards_of(options, "experimental_distribute_dataset")
        return input_util.get_distributed_dataset(
            dataset,
            self._input_workers_with_options(options),
            self._container_strategy(),
            num_replicas_in_sync=1,
            input_context=_own_input(),
            options=options,
        )

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        shards_of(options, "distribute_datasets_from_function")
        return input_util.get_distributed_datasets_from_function(
            dataset_fn,
            self._input_workers_with_options(options),
            [_own_input()],
            self._container_strategy(),
            options=options,
        )


def _own_input() -> Any:
    """Return the input context of a worker that reads its share, in batches of its own."""
    return tf.distribute.InputContext(
        num_input_pipelines=world.size(), input_pipeline_id=world.rank(), num_replicas_in_sync=1
    )
