"""What the extended strategies of hvdx have in common, whatever of TensorFlow's they derive from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import input_util

from hvdx import world
from hvdx.distribute.adopt import adapt_keras_3
from hvdx.distribute.between_ranks import shards_of
from hvdx.distribute.host_iterators import on_host


class BetweenRanks:
    """Stands before a class of TensorFlow's: who takes part and writes, and which part of the input is this rank's."""

    worker_devices: tuple[str, ...]
    _input_workers_with_options: Callable[..., Any]
    _container_strategy: Callable[[], Any]

    def _note_ranks(self) -> None:
        """Set what tf_keras and Keras 2 ask of a MultiWorkerMirroredStrategy."""
        self._task_type, self._task_id, self._num_workers = "worker", world.rank(), world.size()

    def _scope(self, strategy: Any) -> Any:
        adapt_keras_3()  # once more: it may have been imported after the strategy was made
        return super()._scope(strategy)  # type: ignore[misc]

    def _in_multi_worker_mode(self) -> bool:
        return world.size() > 1

    @property
    def should_checkpoint(self) -> bool:
        return world.rank() == 0

    @property
    def should_save_summary(self) -> bool:
        return world.rank() == 0

    def _parts_of_batch(self) -> int:
        """Return among how many replicas a batch is cut."""
        return world.size()

    def _input_context(self) -> Any:
        return tf.distribute.InputContext(world.size(), world.rank(), self._parts_of_batch())

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        shards_of(options, "experimental_distribute_dataset")
        made = input_util.get_distributed_dataset(
            dataset,
            self._input_workers_with_options(options),
            self._container_strategy(),
            num_replicas_in_sync=self._parts_of_batch(),
            input_context=self._input_context() if world.size() > 1 else None,
            options=options,
        )
        return on_host(made, self.worker_devices)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        shards_of(options, "distribute_datasets_from_function")
        made = input_util.get_distributed_datasets_from_function(
            dataset_fn,
            self._input_workers_with_options(options),
            [self._input_context()],
            self._container_strategy(),
            options=options,
        )
        return on_host(made, self.worker_devices)
