"""Metrics over all ranks, exactly: the ranks add their metrics' states (totals and counts) and not their averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdx.ops.convert import to_tensor

Shape = tuple[str, tuple[tuple[tuple[int, ...], str], ...]]
"""A metric's name, and shape and dtype of each of its variables."""


@dataclass
class Phase:
    """What one rank knows after one training epoch or validation.

    Args:
        states: the values of every metric's variables.
        sources: for each name in the logs, which metric gives it.
        results: for each of these names, the value on this rank.
        logs: all values in the logs, by name, without "val_".
    """

    states: list[list[np.ndarray]]
    sources: dict[str, int]
    results: dict[str, np.ndarray]
    logs: dict[str, np.ndarray] = field(default_factory=dict)

    def with_logs(self, logs: dict[str, Any]) -> Phase:
        """Return this phase with the logs Keras made of it; names whose value no metric gives lose their source."""
        values = {name: np.asarray(value) for name, value in logs.items() if _is_number(value)}
        sources = {name: i for name, i in self.sources.items() if name in values and self._gives(name, values[name])}
        return Phase(self.states, sources, self.results, values)

    def _gives(self, name: str, value: np.ndarray) -> bool:
        result = self.results[name]
        return result.shape == value.shape and np.allclose(result, value, rtol=1e-6, atol=0, equal_nan=True)


@dataclass
class Report:
    """What one rank sends: its phases by prefix ("" for training, "val_"), and which metrics its model has."""

    phases: dict[str, Phase]
    shapes: list[Shape]
    means: list[list[str]]
    """How each variable is reduced: "sum", "mean" or "first", as its aggregation says."""


def unique_metrics(model: Any) -> list[Any]:
    """Return the model's metrics, each once."""
    return list({id(metric): metric for metric in model.metrics}.values())


def take(metrics: Sequence[Any]) -> Phase:
    """Return the states of the metrics and their results, as they are now."""
    states, sources, results = [], {}, {}
    for index, metric in enumerate(metrics):
        states.append([np.array(to_tensor(variable)) for variable in metric.variables])
        for name, value in result_of(metric).items():
            sources[name], results[name] = index, value
    return Phase(states, sources, results)


def report(phases: dict[str, Phase], metrics: Sequence[Any]) -> Report:
    """Return what to tell the other ranks."""
    shapes: list[Shape] = []
    means = []
    for metric in metrics:
        variables = list(metric.variables)
        shapes.append((metric.name, tuple((tuple(v.shape), _dtype(v)) for v in variables)))
        means.append([_aggregation(variable) for variable in variables])
    return Report(phases, shapes, means)


def merge(reports: Sequence[Report], metrics: Sequence[Any]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Return the global logs, and for each name that some ranks lack, the ranks that have it.

    Args:
        reports: all ranks' reports, in the order of ranks; equal on all ranks, so that the result is.
        metrics: this model's metrics, which turn summed states into results; their own states are put back.
    """
    logs: dict[str, Any] = {}
    partly: dict[str, list[int]] = {}
    shared = [_is_shared(reports, index) for index in range(len(metrics))]
    for prefix in dict.fromkeys(prefix for one in reports for prefix in one.phases):
        phases = {rank: one.phases[prefix] for rank, one in enumerate(reports) if prefix in one.phases}
        sums: dict[int, dict[str, np.ndarray]] = {}
        for name in dict.fromkeys(name for phase in phases.values() for name in phase.logs):
            have = [rank for rank, phase in phases.items() if name in phase.logs]
            if len(have) < len(reports):
                partly[prefix + name] = have
            found = {phases[rank].sources.get(name, -1) for rank in have}
            index = found.pop() if len(found) == 1 else -1
            if index >= 0 and shared[index]:
                if index not in sums:
                    total = _total([phase.states[index] for phase in phases.values()], reports[0].means[index])
                    sums[index] = _result_with(metrics[index], total)
                value = sums[index].get(name)
            else:
                value = _mean([phases[rank].logs[name] for rank in have])
            if value is not None:
                logs[prefix + name] = float(value) if value.ndim == 0 else value
    return logs, partly


def result_of(metric: Any) -> dict[str, np.ndarray]:
    """Return the metric's results by name, or nothing where it has none yet."""
    try:
        result = metric.result()
    except Exception:  # a metric that has seen no data may raise anything
        return {}
    named = result if isinstance(result, dict) else {metric.name: result}
    return {str(name): np.asarray(value) for name, value in named.items() if _is_number(value)}


def _result_with(metric: Any, state: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    variables = list(metric.variables)
    own = [np.array(to_tensor(variable)) for variable in variables]
    try:
        for variable, value in zip(variables, state, strict=True):
            variable.assign(value)
        return result_of(metric)
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)


def _is_shared(reports: Sequence[Report], index: int) -> bool:
    """Return whether all ranks have this metric with the same variables, so that each can use the others' states."""
    return len({one.shapes[index] if index < len(one.shapes) else None for one in reports}) == 1


def _total(states: Sequence[Sequence[np.ndarray]], means: Sequence[str]) -> list[np.ndarray]:
    """Reduce the ranks' states of one metric, in double precision and in the order of ranks."""
    result = []
    for how, *values in zip(means, *states, strict=True):
        dtype = values[0].dtype
        total = values[0].astype(np.int64 if dtype.kind in "iub" else np.float64)
        for value in values[1:] if how != "first" else ():
            total = total + value
        result.append((total / len(values) if how == "mean" else total).astype(dtype))
    return result


def _mean(values: Sequence[np.ndarray]) -> np.ndarray | None:
    if len({value.shape for value in values}) > 1:
        return None
    return np.mean(np.stack([value.astype(np.float64) for value in values]), axis=0)


def _aggregation(variable: Any) -> str:
    text = str(getattr(variable, "aggregation", "sum")).lower()
    return "mean" if text.endswith("mean") else "first" if text.endswith("only_first_replica") else "sum"


def _dtype(variable: Any) -> str:
    return str(getattr(variable.dtype, "name", variable.dtype))


def _is_number(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "iufb"
    except (TypeError, ValueError):
        return False
