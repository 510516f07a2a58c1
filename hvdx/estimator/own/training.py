"""One call of Estimator.train: the graph, the hooks in their order, and the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigurationError

from .input import call_input_fn, features_and_labels
from .model_fn import EstimatorSpec, ModeKeys
from .run_config import RunConfig
from .warm_start import warm_start

_v1 = tf.compat.v1


def train_model(estimator: Any, input_fn: Callable[..., Any], hooks: Sequence[Any], listeners: Sequence[Any]) -> Any:
    """Build the training graph and run it until a hook stops it or the input ends; return the last loss.

    Raises:
        ConfigurationError: input_fn or model_fn gave something else than they must, or there are listeners and nothing
            that saves.
    """
    config = estimator._config
    with tf.Graph().as_default() as graph, graph.device(estimator._device_fn):
        _v1.set_random_seed(config.tf_random_seed)
        create_global_step(graph)
        _read_global_step()
        result = call_input_fn(input_fn, ModeKeys.TRAIN, estimator.params, estimator.config)
        features, labels, input_hooks = features_and_labels(result)
        spec = estimator._call_model_fn(features, labels, ModeKeys.TRAIN, estimator.config)
        if not tf.train.latest_checkpoint(estimator._model_dir):
            warm_start(estimator._warm_start_settings)
        _summarize_loss(spec.loss)
        worker_hooks = [*input_hooks, *hooks, *_loss_hooks(spec, config), *spec.training_hooks]
        _provide_saver(spec, config)
        saver_hooks = _saver_hooks(estimator, spec, [*worker_hooks, *spec.training_chief_hooks], listeners)
        return _run(estimator, spec, worker_hooks, [*saver_hooks, *spec.training_chief_hooks])


def create_global_step(graph: Any) -> Any:
    """Create the global step, before anything else of the graph."""
    return _v1.train.create_global_step(graph)


def _read_global_step() -> None:
    """Create the tensor by which hooks read the step, ahead of the model.

    Made later, it would shift the numbers of the model's operations, and with them the seeds that TensorFlow derives
    from these numbers: the same model would start from other weights than under tf.estimator.
    """
    _v1.train.StopAtStepHook(num_steps=1).begin()


def _summarize_loss(loss: Any) -> None:
    if not any(summary.op.name == "loss" for summary in _v1.get_collection(_v1.GraphKeys.SUMMARIES)):
        _v1.summary.scalar("loss", loss)
    _v1.add_to_collection(_v1.GraphKeys.LOSSES, loss)


def _loss_hooks(spec: EstimatorSpec, config: RunConfig) -> list[Any]:
    hooks = [_v1.train.NanTensorHook(spec.loss)]
    if config.log_step_count_steps is not None:
        tensors = {"loss": spec.loss, "step": _v1.train.get_global_step()}
        hooks.append(_v1.train.LoggingTensorHook(tensors, every_n_iter=config.log_step_count_steps))
    return hooks


def _provide_saver(spec: EstimatorSpec, config: RunConfig) -> None:
    """Put a saver into the graph, where the scaffold finds it, unless the model brought its own."""
    if spec.scaffold.saver or _v1.get_collection(_v1.GraphKeys.SAVERS):
        return
    saver = _v1.train.Saver(
        sharded=True,
        max_to_keep=config.keep_checkpoint_max,
        keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
        defer_build=True,
        save_relative_paths=True,
    )
    _v1.add_to_collection(_v1.GraphKeys.SAVERS, saver)


def _saver_hooks(estimator: Any, spec: EstimatorSpec, others: list[Any], listeners: Sequence[Any]) -> list[Any]:
    """Return the hook that saves, if the config wants one and there is none yet; give the listeners to whichever saves.

    Raises:
        ConfigurationError: there are listeners, and nothing saves.
    """
    config = estimator._config
    savers = [hook for hook in others if isinstance(hook, _v1.train.CheckpointSaverHook)]
    added = []
    if not savers and (config.save_checkpoints_secs or config.save_checkpoints_steps):
        added = [
            _v1.train.CheckpointSaverHook(
                estimator._model_dir,
                save_secs=config.save_checkpoints_secs,
                save_steps=config.save_checkpoints_steps,
                scaffold=spec.scaffold,
                save_graph_def=config.checkpoint_save_graph_def,
            )
        ]
    if listeners:
        if not savers + added:
            raise ConfigurationError(
                "saving_listeners were given, but nothing saves: set save_checkpoints_steps or save_checkpoints_secs "
                "of the RunConfig, or give a CheckpointSaverHook."
            )
        known = (savers + added)[0]._listeners
        known.extend(listener for listener in listeners if listener not in known)
    return added


def _run(estimator: Any, spec: EstimatorSpec, hooks: list[Any], chief_hooks: list[Any]) -> Any:
    config = estimator._config
    loss = None
    steps = 0
    with _v1.train.MonitoredTrainingSession(
        checkpoint_dir=estimator._model_dir,
        scaffold=spec.scaffold,
        hooks=hooks,
        chief_only_hooks=chief_hooks,
        save_checkpoint_secs=0,  # the hooks save
        save_summaries_steps=config.save_summary_steps,
        config=estimator._session_config,
        max_wait_secs=config.session_creation_timeout_secs,
        log_step_count_steps=config.log_step_count_steps,
        save_graph_def=config.checkpoint_save_graph_def,
    ) as session:
        while not session.should_stop():
            steps += 1
            _, loss = session.run([spec.train_op, spec.loss])
    if not steps:
        tf.compat.v1.logging.warn("Training made no step: a hook stopped it before the first one.")
    return loss
