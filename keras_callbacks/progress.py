"""`ProgressCallback`: one line an epoch, from rank 0."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hvdx import keras_api, world
from hvdx.ops.convert import to_tensor
from keras_callbacks.base import REPORT, Callback


class ProgressCallback(Callback):
    """Print a line for each epoch on rank 0, in place of Keras's bar: `fit(..., verbose=0)`; not collective.

    The line has the epoch, all values of the logs, and the samples per second of all ranks in the training part of the
    epoch. With MetricAverageCallback the values are those of all ranks' data and the samples are counted on all ranks;
    without it they are rank 0's, times the number of ranks.
    """

    position = REPORT

    def __init__(self) -> None:
        super().__init__()
        self._start = 0.0
        self._trained: float | None = None
        self._samples = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._start, self._trained = time.monotonic(), None
        vars(self.model).pop("hvdx_samples", None)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._stop_clock()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._stop_clock()
        if world.rank() != 0:
            return
        samples = vars(self.model).get("hvdx_samples", self._samples * world.size())
        seconds = self._trained or 0.0
        print(line(epoch, self.params.get("epochs"), logs or {}, samples, seconds, world.size()), flush=True)

    def _stop_clock(self) -> None:
        """Take the time and count the samples once an epoch: a validation starts the count anew."""
        if self._trained is None:
            self._trained = time.monotonic() - self._start
            counter = keras_api.loss_weight(self.model)
            self._samples = 0.0 if counter is None else float(np.asarray(to_tensor(counter)))


def line(epoch: int, epochs: int | None, logs: dict[str, Any], samples: float, seconds: float, ranks: int) -> str:
    """Return the line of one epoch, counted from 0."""
    of = f"{epoch + 1}/{epochs}" if epochs else f"{epoch + 1}"
    parts = [f"epoch {of:>7}"]
    parts += [f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, int | float | np.number)]
    if samples > 0 and seconds > 0:
        parts.append(f"{samples / seconds:,.0f} samples/s on {ranks} rank{'s' if ranks > 1 else ''}")
    return "  ".join([*parts, f"{seconds:.1f} s"])
