"""`MetricAverageCallback`: every callback on every rank sees the metrics of all ranks' data, so all decide alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hvdx import keras_api, world
from hvdx.logs import log
from hvdx.ops.objects import allgather_object
from keras_callbacks import callback_list, metric_states
from keras_callbacks.base import AGREE, FIRST, Callback
from keras_callbacks.metric_states import Phase


class MetricAverageCallback(Callback):
    """Replace loss and metrics, at the end of each epoch, by those over all ranks' data; collective.

    The ranks add the states of their metrics (totals and counts), so a mean is weighted by samples, and AUC, precision
    and the like are those of the whole data; an average of averages is neither. Training and validation travel in one
    exchange at the end of the epoch. The callback goes to the front of the list, wherever it was put, so that History,
    EarlyStopping, ReduceLROnPlateau and all others see the global values and decide alike on every rank. After them,
    the ranks agree: training stops everywhere where one rank asks for it, and differing learning rates become rank 0's.

    In `evaluate` the returned values are global, and all ranks must call it. What a rank lacks (a validation that runs
    on rank 0 only) it gets from the ranks that have it, with a warning once. Values that a custom `train_step` or
    `test_step` returns and no metric gives are averaged over the ranks with equal weight. Values shown during an epoch,
    and those given to `on_test_end` of a validation inside `fit`, are those of the rank.

    Raises:
        MismatchError: a rank does not come to the end of the epoch.
        UnsupportedError: in `evaluate`, for a version of Keras whose result cannot be reached.

    Source: tf.distribute sums metric variables in the same way (`tf.VariableAggregation`).
    """

    position = FIRST

    def __init__(self) -> None:
        super().__init__()
        self._fit: Any = None
        self._evaluate: Any = None
        self._phases: dict[str, Phase] = {}
        self._last: dict[str, Any] = {}
        self._epoch = 0
        self._warned: set[str] = set()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._last = {}
        self._fit = self._arrange(EpochAgreement(self.model))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._phases = {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        container = callback_list.find(self)
        if container is not None and container is self._fit:
            # A validation inside fit: it will reset the metrics, whose states are still those of the training.
            self._phases[""] = metric_states.take(metric_states.unique_metrics(self.model))
        else:
            self._evaluate = self._arrange()
            self._hook_result()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._evaluate is not None:
            self._evaluate = None
            vars(self.model).pop(keras_api.result_hook(self.model), None)
        else:
            self._phases["val_"] = metric_states.take(metric_states.unique_metrics(self.model))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None or world.size() == 1:
            return
        if "" not in self._phases:
            self._phases[""] = metric_states.take(metric_states.unique_metrics(self.model))
        phases = {}
        validated = "val_" in self._phases
        for prefix, phase in self._phases.items():
            own = {
                name.removeprefix(prefix): value
                for name, value in logs.items()
                if (validated and name.startswith("val_")) == bool(prefix)
            }
            phases[prefix] = phase.with_logs(own)
        self._last = self._exchange(phases, f"metrics at the end of epoch {epoch + 1}")
        logs.update(self._last)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._fit = None
        if logs:
            logs.update(self._last)

    def _arrange(self, *extra: Callback) -> Any:
        container = callback_list.find(self)
        if container is None:
            log.warning(
                "MetricAverageCallback is called by something that is no list of callbacks, so it cannot go first. Put "
                "it before all callbacks that read the logs."
            )
        else:
            callback_list.arrange(container, *extra)
        return container

    def _exchange(self, phases: dict[str, Phase], what: str) -> dict[str, Any]:
        metrics = metric_states.unique_metrics(self.model)
        reports = allgather_object(metric_states.report(phases, metrics), name=what)
        merged, partly = metric_states.merge(reports, metrics)
        if set(partly) - self._warned:
            self._warned |= set(partly)
            listed = ", ".join(f"{name} (rank {', '.join(map(str, ranks))})" for name, ranks in partly.items())
            log.warning("%s: only some ranks have %s; all ranks use their values.", what, listed)
        self._count_samples(phases, reports, metrics)
        return merged

    def _count_samples(self, phases: dict[str, Phase], reports: list[Any], metrics: list[Any]) -> None:
        """Leave the number of samples of all ranks where ProgressCallback finds it."""
        counter = keras_api.loss_weight(self.model)
        for index, metric in enumerate(metrics):
            for slot, variable in enumerate(metric.variables):
                if variable is counter:
                    parts = [one.phases[""].states[index][slot] for one in reports if "" in one.phases]
                    vars(self.model)["hvdx_samples"] = int(sum(float(part) for part in parts))

    def _hook_result(self) -> None:
        """Make `evaluate` return global values: it asks a method of the model for them, once, at its end."""
        if world.size() == 1:
            return
        name = keras_api.result_hook(self.model)
        original: Callable[[Any], Any] = getattr(self.model, name)
        container = self._evaluate

        def result(logs: Any) -> Any:
            vars(self.model).pop(name, None)
            local = original(logs)
            if container is not None and sys._getframe(1).f_locals.get("callbacks") is not container:
                return local  # the evaluate that this was meant for has failed
            phase = metric_states.take(metric_states.unique_metrics(self.model)).with_logs(dict(local))
            return {**local, **self._exchange({"": phase}, "metrics of evaluate")}

        vars(self.model)[name] = result


class EpochAgreement(Callback):
    """What all ranks must agree on after an epoch's other callbacks: whether to stop, and the learning rate.

    Args:
        model: the model in training.
    """

    position = AGREE

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if world.size() == 1:
            return
        optimizer = getattr(self.model, "optimizer", None)
        settable = optimizer is not None and keras_api.learning_rate_is_number(optimizer)
        own = (bool(self.model.stop_training), keras_api.learning_rate(optimizer) if settable else None)
        everyone = allgather_object(own, name=f"whether to stop after epoch {epoch + 1}, and the learning rate")
        stopping = [rank for rank, (stop, _) in enumerate(everyone) if stop]
        if stopping:
            if len(stopping) < len(everyone) and world.rank() == 0:
                log.warning("rank(s) %s asked to stop after epoch %d; all ranks stop.", stopping, epoch + 1)
            self.model.stop_training = True
        rates = [rate for _, rate in everyone]
        if settable and rates[0] is not None and len(set(rates)) > 1:
            if world.rank() == 0:
                log.warning("learning rates differed after epoch %d: %s; all ranks take rank 0's.", epoch + 1, rates)
            keras_api.set_learning_rate(optimizer, rates[0])
