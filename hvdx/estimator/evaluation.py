"""Evaluating between training steps, for all ranks: on rank 0 while the others wait, or each rank its part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdx import world
from hvdx.errors import CollectiveError, ConfigurationError
from hvdx.estimator.failures import on_all_ranks
from hvdx.estimator.hooks import BroadcastGlobalVariablesHook, MetricAverageHook
from hvdx.estimator.inputs import seeded_alike, shard_input_fn, takes_context, with_context
from hvdx.estimator.writing import hooks_of_this_rank
from hvdx.logs import log
from hvdx.ops.objects import broadcast_object

v1 = tf.compat.v1


class Saved(v1.train.CheckpointSaverListener):  # type: ignore[name-defined]
    """Notes on rank 0 that a checkpoint was saved, and says whether it is time to evaluate it.

    Args:
        throttle_secs: seconds from one evaluation to the next, at least.
        start_delay_secs: seconds from the start of training to the first one, at least.
    """

    def __init__(self, throttle_secs: float, start_delay_secs: float) -> None:
        self._timer = v1.train.SecondOrStepTimer(every_secs=throttle_secs)
        self._not_before = time.monotonic() + start_delay_secs
        self._is_first = True
        self._due = False

    def after_save(self, session: Any, global_step_value: Any) -> None:
        if self._is_first:  # the one before the first step
            self._is_first = False
        elif time.monotonic() >= self._not_before and self._timer.should_trigger_for_step(global_step_value):
            self._timer.update_last_triggered_step(global_step_value)
            self._due = True

    def is_due(self) -> bool:
        """Return whether a checkpoint waits for its evaluation, and forget it."""
        due, self._due = self._due, False
        return due


@dataclass
class Evaluator:
    """Evaluates rank 0's newest checkpoint and exports it; keeps the results.

    Args:
        estimator: this rank's: rank 0's has the directory with the checkpoints.
        spec: the EvalSpec.
        max_steps: of the training; an evaluation at that step or later is the final one for the exporters.
        sharded: whether all ranks evaluate, each its part; else rank 0 evaluates everything.
        timeout: seconds that ranks wait for each other.
        seed: seeds the random operations of the input, alike on all ranks.
    """

    estimator: Any
    spec: Any
    max_steps: int | None
    sharded: bool
    timeout: float
    seed: int
    metrics: dict[str, Any] | None = None
    exports: list[Any] | None = None
    _path: str = field(default="", init=False)

    def evaluate(self) -> None:
        """Evaluate and export, unless there is no new checkpoint; collective.

        Raises:
            CollectiveError: it failed on rank 0 (there: what failed itself).
            ConfigurationError: rank 0 saves its checkpoints somewhere else.
        """
        path, folder = self._told(self._newest, "the newest checkpoint")
        if not path:
            raise on_all_ranks(
                ConfigurationError(
                    f"Rank 0 has saved no checkpoint in its model_dir, {folder}, so there is nothing to evaluate. "
                    "A CheckpointSaverHook of your own must save there."
                )
            )
        if path == self._path:
            log.info("no new checkpoint to evaluate")
            return
        if self.sharded:
            own = self._evaluate_part(path if world.rank() == 0 else None)
            self.metrics, exports = self._told(lambda: (own, self._export(own, path)), "the exports")
        else:
            self.metrics, exports = self._told(lambda: self._evaluate_and_export(path), "the evaluation on rank 0")
        self.exports, self._path = exports, path

    def _newest(self) -> tuple[str, str]:
        return self.estimator.latest_checkpoint() or "", tf.compat.as_str_any(self.estimator.model_dir)

    def _evaluate_and_export(self, path: str) -> tuple[dict[str, Any], list[Any]]:
        metrics = self.estimator.evaluate(
            with_context(self.spec.input_fn, whole=True),
            steps=self.spec.steps,
            hooks=self._hooks,
            checkpoint_path=path,
            name=self.spec.name,
        )
        return metrics, self._export(metrics, path)

    def _evaluate_part(self, path: str | None) -> dict[str, Any]:
        own = self.spec.input_fn
        part = with_context(own) if takes_context(own) else shard_input_fn(own)
        with world.patience(self.timeout):  # parts may take differently long
            result: dict[str, Any] = self.estimator.evaluate(
                seeded_alike(part, self.seed),
                steps=self.spec.steps,
                hooks=[BroadcastGlobalVariablesHook(0), *self._hooks, MetricAverageHook()],
                checkpoint_path=path,
                name=self.spec.name,
            )
        return result

    @property
    def _hooks(self) -> list[Any]:
        """The user's hooks; an average of metrics is made here where it is due, and must not be made twice."""
        return [hook for hook in hooks_of_this_rank(self.spec.hooks) if not isinstance(hook, MetricAverageHook)]

    def _export(self, metrics: dict[str, Any], path: str) -> list[Any]:
        final = self.max_steps is not None and metrics[v1.GraphKeys.GLOBAL_STEP] >= self.max_steps
        folder = os.path.join(tf.compat.as_str_any(self.estimator.model_dir), "export")
        return [
            exporter.export(
                estimator=self.estimator,
                export_path=os.path.join(folder, tf.compat.as_str_any(exporter.name)),
                checkpoint_path=path,
                eval_result=metrics,
                is_the_final_export=final,
            )
            for exporter in self.spec.exporters
        ]

    def _told(self, function: Callable[[], Any], what: str) -> Any:
        """Return on every rank what the function returns on rank 0, where alone it runs."""
        value, failure, before = None, None, world.last_error()
        if world.rank() == 0:
            try:
                value = function()
            except Exception as error:
                if world.last_error() is not before:  # a collective of its own, which the others have not met
                    raise
                failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        with world.patience(self.timeout if world.rank() else 0):
            value, told = broadcast_object((value, told), 0, name=what)
        if failure is not None:
            raise on_all_ranks(failure)
        if told is not None:
            raise on_all_ranks(CollectiveError(f"Rank 0 failed in {what}: {told}"))
        return value
