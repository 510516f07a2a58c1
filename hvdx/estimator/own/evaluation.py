"""One call of Estimator.evaluate: the graph, the loop over batches, the final values and their summaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.errors import ConfigurationError

from .input import call_input_fn, features_and_labels
from .model_fn import EstimatorSpec, ModeKeys
from .training import create_global_step
from .warm_start import warm_start

_v1 = tf.compat.v1


def evaluate_model(
    estimator: Any,
    input_fn: Callable[..., Any],
    steps: int | None,
    hooks: Sequence[Any],
    checkpoint_path: str | None,
    output_dir: str,
) -> dict[str, Any]:
    """Build the evaluation graph, run it over the batches and return the final values.

    Raises:
        ConfigurationError: a metric takes a name that is taken, or input_fn or model_fn gave something unusable.
    """
    with tf.Graph().as_default() as graph:
        _v1.set_random_seed(estimator._config.tf_random_seed)
        create_global_step(graph)
        result = call_input_fn(input_fn, ModeKeys.EVAL, estimator.params, estimator.config)
        features, labels, input_hooks = features_and_labels(result)
        spec = estimator._call_model_fn(features, labels, ModeKeys.EVAL, estimator.config)
        update_op, final_ops = _metric_ops(spec)
        if not checkpoint_path:
            warm_start(estimator._warm_start_settings)
        stop_hooks = [] if steps is None else [_StopAfterBatches(steps)]
        values = _run(
            estimator,
            spec,
            checkpoint_path,
            update_op,
            final_ops,
            [*input_hooks, *hooks, *stop_hooks, *spec.evaluation_hooks],
        )
        _write_summaries(output_dir, values, checkpoint_path)
        return values


def _metric_ops(spec: EstimatorSpec) -> tuple[Any, dict[str, Any]]:
    """Return the op that takes a batch into account, and the tensors of the final values by name."""
    metrics = dict(spec.eval_metric_ops)
    for taken in ("loss", _v1.GraphKeys.GLOBAL_STEP):
        if taken in metrics:
            raise ConfigurationError(
                f"eval_metric_ops has a metric named {taken!r}, a name that evaluate() uses itself; rename the metric."
            )
    metrics["loss"] = _v1.metrics.mean(spec.loss)
    ordered = sorted(metrics.items())  # the same graph each time, on each machine
    final_ops = {name: value for name, (value, _) in ordered}
    final_ops[_v1.GraphKeys.GLOBAL_STEP] = _v1.train.get_global_step()
    return tf.group(*(update for _, (_, update) in ordered)), final_ops


def _run(
    estimator: Any,
    spec: EstimatorSpec,
    checkpoint_path: str | None,
    update_op: Any,
    final_ops: dict[str, Any],
    hooks: list[Any],
) -> dict[str, Any]:
    eval_step = _create_eval_step()
    scaffold = _with_local_variables(spec.scaffold)
    update_step = _v1.assign_add(eval_step, 1, use_locking=True)
    with tf.control_dependencies([update_op, update_step]):
        batches_done = tf.identity(eval_step.read_value())
    for hook in hooks:
        if isinstance(hook, _StopAfterBatches):
            hook.batches_done = batches_done
    # The last of the hooks: what the others change in their end() counts.
    final = _v1.train.FinalOpsHook(final_ops)
    creator = _v1.train.ChiefSessionCreator(
        scaffold=scaffold, checkpoint_filename_with_path=checkpoint_path, config=estimator._session_config
    )
    with _v1.train.MonitoredSession(session_creator=creator, hooks=[*hooks, final]) as session:
        while not session.should_stop():
            session.run([update_op, update_step])
    return final.final_ops_values


def _create_eval_step() -> Any:
    collections = [_v1.GraphKeys.LOCAL_VARIABLES, _v1.GraphKeys.EVAL_STEP]
    existing = _v1.get_collection(_v1.GraphKeys.EVAL_STEP)
    if existing:
        return existing[0]
    return _v1.get_variable(
        "eval_step", [], tf.int64, _v1.zeros_initializer(), trainable=False, collections=collections
    )


def _with_local_variables(scaffold: Any) -> Any:
    """Return the scaffold with a local_init_op that also initializes the metrics, which the model did not know of."""
    if not scaffold.local_init_op:
        return scaffold
    everything = tf.group(scaffold.local_init_op, _v1.train.Scaffold.default_local_init_op())
    return _v1.train.Scaffold(local_init_op=everything, copy_from_scaffold=scaffold)


class _StopAfterBatches(tf.compat.v1.train.SessionRunHook):
    """Stop when so many batches have been evaluated, and log how far it is."""

    def __init__(self, batches: int) -> None:
        self.batches_done: Any = None
        self._batches = batches
        self._log_every = max(1, batches // 10) if batches >= 20 else 1

    def before_run(self, run_context: Any) -> Any:
        return _v1.train.SessionRunArgs(self.batches_done)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        done = run_values.results
        if done % self._log_every == 0 or done == self._batches:
            _v1.logging.info("Evaluation [%d/%d]", done, self._batches)
        if done >= self._batches:
            run_context.request_stop()


def _write_summaries(output_dir: str, values: dict[str, Any], checkpoint_path: str | None) -> None:
    """Write the values, and the path of the checkpoint they belong to, into an event file."""
    step = values[_v1.GraphKeys.GLOBAL_STEP]
    shown = ", ".join(f"{name} = {value}" for name, value in sorted(values.items()) if not isinstance(value, bytes))
    _v1.logging.info("Saving the evaluation at global step %d: %s", step, shown)
    writer = _v1.summary.FileWriterCache.get(output_dir)
    summary = _v1.Summary()
    for name, value in values.items():
        if name != _v1.GraphKeys.GLOBAL_STEP and value is not None:
            _add_value(summary, name, value)
    writer.add_summary(summary, step)
    if checkpoint_path:
        path = _v1.Summary()
        path.value.add(tag="checkpoint_path", tensor=tf.make_tensor_proto(checkpoint_path, tf.string))
        writer.add_summary(path, step)
    writer.flush()


def _add_value(summary: Any, name: str, value: Any) -> None:
    if isinstance(value, (float, int, np.float32, np.int32, np.int64)):
        summary.value.add(tag=name, simple_value=float(value))
    elif isinstance(value, np.ndarray):
        summary.value.add(tag=name, node_name=name, tensor=tf.make_tensor_proto(value))
    elif isinstance(value, bytes):  # a metric whose value is a whole summary, such as an image
        try:
            parts = _v1.Summary.FromString(value).value
        except ValueError:  # what protobuf's DecodeError is
            _v1.logging.warn("The value of metric %s is a string and no summary; it is not written.", name)
            return
        for number, part in enumerate(parts):
            part.tag = f"{name}/{number}"
            summary.value.append(part)
    else:
        _v1.logging.warn("The value of metric %s is of type %s; it is not written.", name, type(value).__name__)
