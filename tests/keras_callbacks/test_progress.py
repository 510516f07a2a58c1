"""ProgressCallback: one tidy line an epoch from rank 0, with the samples of all ranks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import hvdx as hvd
from keras_callbacks.progress import line

pytestmark = pytest.mark.np(2)


def test_the_line() -> None:
    text = line(2, 10, {"loss": 0.123456, "auc": np.float32(0.5), "text": "no"}, 3000, 2.0, 4)
    assert text == "epoch    3/10  loss 0.1235  auc 0.5  1,500 samples/s on 4 ranks  2.0 s"
    assert line(0, None, {}, 0, 1.0, 1) == "epoch       1  1.0 s"


@pytest.mark.parametrize("averaged", [False, True])
def test_one_line_an_epoch_from_rank_0(keras: Any, averaged: bool, capfd: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    samples = 6 + 2 * hvd.rank()
    x = np.random.default_rng(hvd.rank()).normal(size=(samples, 2))
    seen: list[float] = []
    monkeypatch.setattr("keras_callbacks.progress.line", lambda *a: seen.append(a[3]) or line(*a))
    more = [hvd.callbacks.MetricAverageCallback()] if averaged else []
    history = model.fit(
        x, x[:, :1], batch_size=8, epochs=2, verbose=0, validation_data=(x, x[:, :1]),
        callbacks=[hvd.callbacks.ProgressCallback(), *more],
    ).history  # fmt: skip
    lines = [text for text in capfd.readouterr().out.splitlines() if text.startswith("epoch ")]
    if hvd.rank() != 0:
        assert lines == []
        return
    total = sum(6 + 2 * rank for rank in range(hvd.size())) if averaged else 6 * hvd.size()
    assert seen == [total, total]
    assert len(lines) == 2
    for epoch, text in enumerate(lines):
        assert re.fullmatch(
            rf"epoch     {epoch + 1}/2  loss \S+  val_loss \S+  [\d,]+ samples/s on \d+ ranks?  \S+ s", text
        )
        assert f"  loss {history['loss'][epoch]:.4g}" in text
        assert f"  val_loss {history['val_loss'][epoch]:.4g}" in text
