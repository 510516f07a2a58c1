"""`RunConfig(train_distribute=...)` with a strategy of hvdx: the ranks are its replicas.

tf.estimator would let every rank write, and start from weights of its own. So `train_and_evaluate` trains as it does
without a strategy, but calls the model_fn in a replica of it: there an optimizer that nobody wrapped reduces, and one
that was wrapped does not do it twice.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from hvdx.errors import UnsupportedError
from hvdx.estimator.inputs import asking_like
from hvdx.training.under_strategy import is_of_hvdx, starting_equal


def in_replica(estimator: Any) -> Any:
    """Return the Estimator without its strategy, if that is hvdx's: its model_fn trains in a replica."""
    if not hasattr(estimator, "config"):
        return estimator  # is no Estimator
    evaluating = is_of_hvdx(getattr(estimator.config, "eval_distribute", None))
    if evaluating:  # the ranks share an evaluation as `evaluation=` says
        estimator = copy.copy(estimator)
        estimator._config = estimator.config.replace(eval_distribute=None)
        estimator._eval_distribution = None
    strategy: Any = getattr(estimator.config, "train_distribute", None)
    if not is_of_hvdx(strategy):
        return estimator
    if len(strategy.extended.worker_devices) > 1:
        raise UnsupportedError(
            "train_and_evaluate on several ranks trains on one device of each. Received: train_distribute with "
            f"{', '.join(strategy.extended.worker_devices)}. Start a rank for each device, with "
            'strategy("multi_worker").'
        )
    model_fn = estimator._model_fn

    @asking_like(model_fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mode", "train") != "train":
            return model_fn(*args, **kwargs)
        # tf.compat.v1's optimizers divide the loss by the number of replicas where a strategy says so
        scaled = getattr(strategy, "_scale_loss_for_estimator_enabled", contextlib.nullcontext)
        with strategy.scope(), scaled(), starting_equal():
            return strategy.extended.call_for_each_replica(model_fn, args, kwargs)

    other = copy.copy(estimator)
    other._config = estimator.config.replace(train_distribute=None)
    other._train_distribution = None
    other._model_fn = call
    return other
