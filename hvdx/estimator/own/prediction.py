"""One call of Estimator.predict: the graph, and its batches cut into single examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigurationError

from .input import call_input_fn, features_and_labels, warn_of_endless_input
from .model_fn import ModeKeys
from .training import create_global_step
from .warm_start import warm_start

_v1 = tf.compat.v1


def predict_batches(
    estimator: Any,
    input_fn: Callable[..., Any],
    predict_keys: Sequence[str] | None,
    hooks: Sequence[Any],
    checkpoint_path: str | None,
) -> Iterator[Any]:
    """Yield the predictions of each batch.

    The graph is the default one only while it works, never while the caller looks at a batch, so that several
    predictions may be drawn in turn.

    Raises:
        ConfigurationError: unknown predict_keys, or input_fn or model_fn gave something unusable.
    """
    with tf.Graph().as_default() as graph:
        _v1.set_random_seed(estimator._config.tf_random_seed)
        create_global_step(graph)
        result = call_input_fn(input_fn, ModeKeys.PREDICT, estimator.params, estimator.config)
        features, _, input_hooks = features_and_labels(result)
        warn_of_endless_input(features)
        spec = estimator._call_model_fn(features, None, ModeKeys.PREDICT, estimator.config)
        if not checkpoint_path:
            warm_start(estimator._warm_start_settings)
        predictions = _chosen(spec.predictions, predict_keys)
        creator = _v1.train.ChiefSessionCreator(
            scaffold=spec.scaffold,
            checkpoint_filename_with_path=checkpoint_path,
            config=estimator._session_config,
        )
        all_hooks = [*input_hooks, *hooks, *spec.prediction_hooks]
        session = _v1.train.MonitoredSession(session_creator=creator, hooks=all_hooks)
    with _ClosedInGraph(graph, session):
        while True:
            with graph.as_default():
                if session.should_stop():
                    return
                batch = session.run(predictions)
            yield batch


def single_examples(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the examples of batches of arrays, or of dicts of arrays.

    Raises:
        ConfigurationError: the arrays of a dict are not equally long.
    """
    for batch in batches:
        if not isinstance(batch, dict):
            yield from batch
            continue
        lengths = {name: value.shape[0] if value.shape else 0 for name, value in batch.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigurationError(
                f"The predictions of a batch have different lengths {lengths}; give yield_single_examples=False, "
                "or predict_keys that are equally long."
            )
        for number in range(next(iter(lengths.values()))):
            yield {name: value[number] for name, value in batch.items()}


def _chosen(predictions: Any, keys: Sequence[str] | None) -> Any:
    if not keys:
        return predictions
    if not isinstance(predictions, dict):
        raise ConfigurationError("predict_keys chooses from a dict of predictions, but this model gives one tensor.")
    chosen = {name: value for name, value in predictions.items() if name in keys}
    if not chosen:
        raise ConfigurationError(f"predict_keys {list(keys)} are none of the predictions {sorted(predictions)}.")
    return chosen


class _ClosedInGraph(AbstractContextManager[None]):
    """Closes a session with its graph as the default one, as the end() of hooks expects."""

    def __init__(self, graph: Any, session: Any) -> None:
        self._graph = graph
        self._session = session

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        with self._graph.as_default():
            return bool(self._session.__exit__(kind, error, traceback))
