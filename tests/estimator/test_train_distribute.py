"""`RunConfig(train_distribute=hvdx.distribute.strategy("multi_worker"))` on several ranks against one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdx as hvd
from hvdx import estimator
from hvdx.distribute import strategy
from tests.estimator import distributed_models as models
from tests.training.support import raised_everywhere

v1 = tf.compat.v1
pytestmark = [
    pytest.mark.np(2, 3),
    pytest.mark.skipif(not estimator.has_tf_estimator(), reason="strategies of Estimators end with TensorFlow 2.15"),
]


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
@pytest.mark.parametrize(
    "optimizer", [lambda: v1.train.AdamOptimizer(0.1), lambda: v1.train.MomentumOptimizer(0.1, 0.9)]
)
def test_as_one_process(world: Any, folder: Path, tmp_path: Path, wrapped: bool, optimizer: Any) -> None:
    """An optimizer that nobody wrapped reduces, one that was wrapped does so once, and rank 0 alone writes."""
    made = strategy("multi_worker")
    config = estimator.RunConfig(
        save_checkpoints_steps=2, train_distribute=made, eval_distribute=made if wrapped else None
    )
    params = {"seed": world.rank(), "distributed": wrapped, "optimizer": optimizer}
    mine = estimator.Estimator(models.model_fn, str(folder), config, params)
    metrics, _ = hvd.estimator.train_and_evaluate(mine, *models.specs(), evaluation="sharded")
    alone = models.make(tmp_path / "alone", distributed=False, optimizer=optimizer)
    alone.train(models.whole_input, max_steps=models.STEPS)
    expected = alone.evaluate(models.eval_input)
    assert metrics is not None
    for name in ("loss", "mae", "auc", "global_step"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    if world.rank() == 0:
        for name in ("linear/kernel", "linear/bias"):
            found = tf.train.load_variable(str(folder), name)
            np.testing.assert_allclose(found, alone.get_variable_value(name), rtol=1e-5, atol=1e-6)
        assert f"model.ckpt-{models.STEPS}.index" in os.listdir(folder)


@pytest.mark.np(2, plain=False)
def test_tf_estimator_itself_is_refused_on_ranks(world: Any, folder: Path) -> None:
    """It would let every rank write, and start from weights of its own."""
    config = estimator.RunConfig(save_checkpoints_steps=2, train_distribute=strategy("multi_worker"))
    private = folder if world.rank() == 0 else folder / str(world.rank())
    mine = estimator.Estimator(models.model_fn, str(private), config, {"distributed": False})
    for message in raised_everywhere(hvd.UnsupportedError, lambda: mine.train(models.whole_input, max_steps=2)):
        assert "hvdx.estimator.train_and_evaluate" in message
        assert "linear/kernel" in message or "global_step" in message


def test_a_strategy_of_tensorflow_is_refused_on_ranks(world: Any, folder: Path) -> None:
    if world.size() == 1:
        return
    config = estimator.RunConfig(save_checkpoints_steps=2, train_distribute=tf.distribute.OneDeviceStrategy("CPU:0"))
    mine = estimator.Estimator(models.model_fn, str(folder), config, {})
    with pytest.raises(hvd.UnsupportedError, match=r'strategy\("multi_worker"\)'):
        hvd.estimator.train_and_evaluate(mine, *models.specs())
