"""`train_and_evaluate`: tf.estimator's, on several ranks."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from typing import Any

import tensorflow as tf

from hvdx import world
from hvdx.errors import ConfigurationError, UnsupportedError
from hvdx.estimator.evaluation import Evaluator, Saved
from hvdx.estimator.failures import failing_together, on_all_ranks, restoring
from hvdx.estimator.hooks import BroadcastGlobalVariablesHook
from hvdx.estimator.inputs import seeded_alike, with_context
from hvdx.estimator.lookahead import with_lookahead
from hvdx.estimator.steps import StepAgreement
from hvdx.estimator.under_strategy import in_replica
from hvdx.estimator.writing import hooks_of_this_rank, saving, without_writing
from hvdx.logs import log
from hvdx.ops.objects import allgather_object, broadcast_object

v1 = tf.compat.v1


def train_and_evaluate(
    estimator: Any,
    train_spec: Any,
    eval_spec: Any,
    *,
    evaluation: str = "rank 0",
    evaluation_timeout: float = 3600.0,
) -> tuple[dict[str, Any] | None, list[Any] | None]:
    """Train an Estimator on all ranks and evaluate its checkpoints in between; collective.

    Rank 0 reads and writes `model_dir`: checkpoints, summaries, exports. The others get its state by broadcast, need
    not see the directory, and write nothing. All ranks stop after the same step: at `max_steps`, when the data of one
    of them ends, or when a hook on one of them asks for it. In a world of one rank it does what one process does.

    Args:
        estimator: of `tf.estimator` or of `hvdx.estimator`, the same on every rank. Its model_fn wraps the optimizer
            with hvd.DistributedOptimizer.
        train_spec: a TrainSpec. Its input_fn gives this rank's part of the data: take an `input_context` in it, or wrap
            it with `hvdx.estimator.shard_input_fn`.
        eval_spec: an EvalSpec. `start_delay_secs` counts on several ranks; alone, as in tf.estimator, it does not.
        evaluation: "rank 0": rank 0 evaluates while the others wait; "sharded": every rank evaluates its part (a
            dataset without `input_context` is divided batch by batch), at most `steps` batches, with exact metrics.
        evaluation_timeout: seconds that ranks wait for each other to evaluate, and for rank 0 to export.

    Returns:
        What tf.estimator's returns, on every rank: the metrics of the last evaluation, and the results of the
        exporters; (None, None) where the training had already ended before.

    Raises:
        ConfigurationError: the ranks' settings differ, or have no meaning.
        CheckpointError: the checkpoint is of another model.
        UnsupportedError: a `train_distribute` that is not hvdx's, or a TF_CONFIG cluster on several ranks.
        MismatchError: another rank failed; says which, and why.
    """
    if evaluation not in ("rank 0", "sharded"):
        raise ConfigurationError(f"evaluation is 'rank 0' or 'sharded'. Received: {evaluation!r}.")
    if world.size() == 1 and _is_stock(estimator):
        result: tuple[Any, Any] = tf.estimator.train_and_evaluate(*_with_contexts(estimator, train_spec, eval_spec))
        return result
    with failing_together():
        return _run(estimator, train_spec, eval_spec, evaluation == "sharded", evaluation_timeout)


def _is_stock(estimator: Any) -> bool:
    return any(cls.__module__.startswith("tensorflow_estimator.") for cls in type(estimator).__mro__)


def _with_contexts(estimator: Any, train_spec: Any, eval_spec: Any) -> tuple[Any, Any, Any]:
    """Return the arguments with an InputContext given to each input_fn: tf.estimator gives one to strategies only."""
    config = estimator.config
    if isinstance(train_spec, tf.estimator.TrainSpec) and config.train_distribute is None:
        train_spec = train_spec._replace(input_fn=with_context(train_spec.input_fn))
    if isinstance(eval_spec, tf.estimator.EvalSpec) and config.eval_distribute is None:
        eval_spec = eval_spec._replace(input_fn=with_context(eval_spec.input_fn))
    return estimator, train_spec, eval_spec


def _run(
    estimator: Any, train_spec: Any, eval_spec: Any, sharded: bool, timeout: float
) -> tuple[dict[str, Any] | None, list[Any] | None]:
    estimator = in_replica(estimator)
    _check(estimator, train_spec, eval_spec, sharded)
    start, seed = broadcast_object((_saved_step(estimator.model_dir), _seed(estimator)), 0, name="the saved step")
    if train_spec.max_steps is not None and start >= train_spec.max_steps:
        log.info("nothing to train: the checkpoint is of step %d, and max_steps is %d", start, train_spec.max_steps)
        return None, None
    with tempfile.TemporaryDirectory(prefix="hvdx-estimator-") as private:
        own = without_writing(estimator, private, seed) if world.rank() else saving(estimator, train_spec.hooks)
        evaluator = Evaluator(own, eval_spec, train_spec.max_steps, sharded, timeout, seed)
        delay = eval_spec.start_delay_secs if world.size() > 1 else 0
        saved = Saved(eval_spec.throttle_secs, delay)
        input_fn, ahead = with_lookahead(seeded_alike(with_context(train_spec.input_fn), seed))
        hooks = [
            StepAgreement(ahead, evaluator.evaluate, saved.is_due),
            BroadcastGlobalVariablesHook(0),
            *hooks_of_this_rank(train_spec.hooks),
        ]
        listeners = {"saving_listeners": [*train_spec.saving_listeners, saved]} if world.rank() == 0 else {}
        with restoring(estimator.model_dir):
            own.train(input_fn, hooks=hooks, max_steps=train_spec.max_steps, **listeners)
        evaluator.evaluate()
    return evaluator.metrics, evaluator.exports


def _check(estimator: Any, train_spec: Any, eval_spec: Any, sharded: bool) -> None:
    """Compare the ranks' settings; every rank raises the same error."""
    wrong = _wrong_type(estimator, train_spec, eval_spec)
    config = getattr(estimator, "config", None)
    distributes = getattr(config, "train_distribute", None) is not None or getattr(config, "cluster_spec", None)
    if not wrong and world.size() > 1 and distributes:
        wrong = (
            "RunConfig(train_distribute=...) and TF_CONFIG clusters distribute by themselves, and cannot be combined "
            f"with {world.size()} ranks. Leave them out: the ranks are the replicas; or pass "
            'train_distribute=hvdx.distribute.strategy("multi_worker").'
        )
    mine = {
        "wrong": wrong,
        "max_steps": getattr(train_spec, "max_steps", None),
        "evaluation": "sharded" if sharded else "rank 0",
        "folder": None if wrong else _given_folder(estimator.model_dir),
    }
    everybody = allgather_object(mine, name="settings of train_and_evaluate")
    for rank, theirs in enumerate(everybody):
        if theirs["wrong"]:
            kind = UnsupportedError if "train_distribute" in theirs["wrong"] else ConfigurationError
            raise on_all_ranks(kind(f"Rank {rank}: {theirs['wrong']}"))
    for name in ("max_steps", "evaluation"):
        values = [theirs[name] for theirs in everybody]
        if any(value != values[0] for value in values):
            said = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
            raise on_all_ranks(
                ConfigurationError(f"{name} of train_and_evaluate must be the same on every rank. Received: {said}.")
            )
    folders = [theirs["folder"] for theirs in everybody]
    for rank, folder in enumerate(folders):
        if folder is not None and folder != folders[0]:
            raise on_all_ranks(
                ConfigurationError(
                    f"Rank {rank} was given model_dir={folder!r}, and rank 0 {_or_none(folders[0])}. Only rank 0 reads "
                    "and writes it: give all ranks the same, or rank 0 alone."
                )
            )


def _or_none(folder: str | None) -> str:
    return "none" if folder is None else repr(folder)


def _wrong_type(estimator: Any, train_spec: Any, eval_spec: Any) -> str:
    needed: list[tuple[str, Any, tuple[str, ...]]] = [
        ("estimator", estimator, ("train", "evaluate", "model_dir", "config")),
        ("train_spec", train_spec, ("input_fn", "max_steps", "hooks", "saving_listeners")),
        ("eval_spec", eval_spec, ("input_fn", "steps", "hooks", "exporters", "throttle_secs", "start_delay_secs")),
    ]
    kinds = {"estimator": "an Estimator", "train_spec": "a TrainSpec", "eval_spec": "an EvalSpec"}
    for name, value, attributes in needed:
        if not all(hasattr(value, attribute) for attribute in attributes):
            return f"train_and_evaluate takes {kinds[name]} as {name}. Received: {value!r}."
    return ""


def _given_folder(model_dir: Any) -> str | None:
    """Return the directory a user has given; None for one that an Estimator has made for itself."""
    folder = os.path.abspath(os.fspath(model_dir))
    made = os.path.dirname(folder) == os.path.abspath(tempfile.gettempdir())
    return None if made and re.fullmatch(r"tmp[a-z0-9_]{8}", os.path.basename(folder)) else folder


def _saved_step(model_dir: Any) -> int:
    """Return the global step of the newest checkpoint, or 0."""
    path = tf.train.latest_checkpoint(os.fspath(model_dir)) if world.rank() == 0 else None
    if path is None:
        return 0
    reader = tf.train.load_checkpoint(path)
    name = v1.GraphKeys.GLOBAL_STEP
    return int(reader.get_tensor(name)) if reader.has_tensor(name) else 0


def _seed(estimator: Any) -> int:
    given = estimator.config.tf_random_seed
    return secrets.randbelow(1 << 31) if given is None else int(given)
