"""`LearningRateWarmupCallback`: from the rate of one process to the rate of all, over the first epochs."""

from __future__ import annotations

from typing import Any

from hvdx import keras_api, world
from hvdx.errors import ConfigurationError
from keras_callbacks import schedules
from keras_callbacks.learning_rate_schedule import LearningRateScheduleCallback


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate at every step, from about `initial_lr` / size to `initial_lr`, over the first epochs.

    `initial_lr` is the scaled rate, as a rule the rate of one process times hvd.size(): the optimizer is created with
    it. Collective at the start of `fit` where `steps_per_epoch` is None. For what comes after, add
    LearningRateScheduleCallbacks that start at `warmup_epochs`.

    Args:
        initial_lr: the rate at the end of the warm-up.
        warmup_epochs: number of epochs; 0 means no warm-up.
        momentum_correction, steps_per_epoch: as in LearningRateScheduleCallback.
        verbose: 1 prints a line on rank 0 when the warm-up is over.

    Raises:
        ConfigurationError, OptimizerError: as LearningRateScheduleCallback.

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if isinstance(warmup_epochs, bool) or not isinstance(warmup_epochs, int | float) or warmup_epochs < 0:
            raise ConfigurationError(f"warmup_epochs is a number of epochs, 0 or more. Received: {warmup_epochs!r}.")
        super().__init__(initial_lr, 1.0, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def rate(self, epoch: float) -> float:
        size, length = world.size(), float(self.window.end or 0)
        return self.initial_lr * schedules.warmup_multiplier(epoch, size, length, self._steps)

    def final_rate(self) -> float:
        return self.initial_lr

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        over = not self.window.is_over(epoch) and self.window.is_over(epoch + 1)
        if self.verbose and over and world.rank() == 0:
            rate = keras_api.learning_rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: the warm-up of the learning rate is over, at {rate:g}.", flush=True)
