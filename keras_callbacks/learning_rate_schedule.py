"""`LearningRateScheduleCallback`: the learning rate as a function of the epoch, per epoch or per step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx import keras_api
from hvdx.errors import ConfigurationError, OptimizerError
from hvdx.ops.convert import to_tensor
from hvdx.ops.objects import allgather_object
from keras_callbacks import callback_list, schedules
from keras_callbacks.base import Callback
from keras_callbacks.schedules import Multiplier, Window


class LearningRateScheduleCallback(Callback):
    """Set the learning rate to `initial_lr` times `multiplier`, in the epochs from `start_epoch` to `end_epoch`.

    Several of these, and a warm-up, can stand in one list; where their epochs overlap the later one counts. After its
    epochs the rate stays as it was last. The rate depends on nothing but epoch and step: a training that goes on at
    `initial_epoch` has the rates it would have had. The rate is put into the logs, under the name this Keras gives it.

    Collective at the start of `fit` where `staircase` is False and `steps_per_epoch` None (the ranks take the largest
    number of steps), else not; every rank must have it, as the rate must be the same on all.

    Args:
        initial_lr: the base rate, above 0.
        multiplier: a function of the epoch, or a number m, which means m ** (epoch - start_epoch).
        start_epoch: the first epoch (from 0) in which the rate is set.
        end_epoch: the first epoch in which it no longer is; None means never.
        staircase: True sets the rate once an epoch, False at every step, with a fraction as the epoch.
        momentum_correction: whether the momentum buffers of SGD and RMSprop are scaled with the rate. They contain the
            rate of earlier steps; scaled, they are what they would be had the rate been the new one all along.
        steps_per_epoch: None takes what Keras counts.

    Raises:
        ConfigurationError: an option has no meaning, or Keras does not know the number of steps.
        OptimizerError: the optimizer's rate is a LearningRateSchedule, which this cannot set.

    Source: Goyal et al. 2017, arXiv:1706.02677, sections 2.1 and 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Multiplier,
        start_epoch: float = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = _positive(initial_lr, "initial_lr")
        if not callable(multiplier):
            _positive(multiplier, "multiplier, if it is no function,")
        if end_epoch is not None and end_epoch < start_epoch:
            raise ConfigurationError(f"end_epoch ({end_epoch}) comes before start_epoch ({start_epoch}).")
        if steps_per_epoch is not None:
            _positive(steps_per_epoch, "steps_per_epoch")
        self.multiplier = multiplier
        self.window = Window(start_epoch, end_epoch)
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._steps = 1
        self._container: Any = None
        self._epoch: int | None = None
        self._batch = 0
        self._active = False

    def rate(self, epoch: float) -> float:
        """Return the rate at an epoch, which has a fraction where the rate changes every step."""
        return self.initial_lr * schedules.multiplied(epoch, self.multiplier, self.window.start)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        name = type(self).__name__
        if not keras_api.learning_rate_is_number(self.model.optimizer):
            raise OptimizerError(
                f"{name} cannot set the learning rate of this {type(self.model.optimizer).__name__}, as it is a "
                "LearningRateSchedule. Create the optimizer with a number, or leave the callback out."
            )
        self._container = callback_list.find(self)
        self._epoch = None
        if not self.staircase:
            self._steps = self.steps_per_epoch or self._agreed_steps()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        rules = self._rules()
        first, self._epoch, self._batch = self._epoch is None, epoch, 0
        self._active = _is(rules, schedules.in_charge([rule.window for rule in rules], epoch), self)
        if self._active and self.staircase:
            self._set(self.rate(epoch))
        elif first and _is(rules, schedules.last_in_charge([rule.window for rule in rules], epoch), self):
            self._set_final_rate()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batch = batch
        if self._active and not self.staircase:
            self._set(self.rate((self._epoch or 0) + batch / self._steps))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs[keras_api.rate_name(self.model)] = keras_api.learning_rate(self.model.optimizer)

    def final_rate(self) -> float:
        """Return the rate of the last step of the last epoch in which this sets the rate."""
        end = self.window.end if self.window.end is not None else math.inf
        return self.rate(max(self.window.start, math.ceil(end) - (1 if self.staircase else 1 / self._steps)))

    def set_again(self) -> bool:
        """Set the rate of the step that is about to begin once more, after a checkpoint has changed it.

        Returns:
            Whether this callback sets the rate in the present epoch.
        """
        if self._active and self._epoch is not None:
            self._set(self.rate(self._epoch if self.staircase else self._epoch + self._batch / self._steps))
            return True
        return False

    def _implements_train_batch_hooks(self) -> bool:
        return not self.staircase

    def _set_final_rate(self) -> None:
        """Where the training begins after this rule's epochs, put the rate into force that it ended with."""
        # Not after a checkpoint, which has brought the one that really was: another callback may have lowered it since.
        if not any(getattr(other, "resumed", False) for other in callback_list.neighbours(self._container)):
            self._set(self.final_rate())

    def _set(self, rate: float) -> None:
        optimizer = self.model.optimizer
        old = keras_api.learning_rate(optimizer)
        keras_api.set_learning_rate(optimizer, rate)
        new = keras_api.learning_rate(optimizer)
        if self.momentum_correction and old > 0 and new != old:
            for velocity in keras_api.velocities(optimizer):
                value = to_tensor(velocity)
                velocity.assign(value * tf.cast(new / old, value.dtype))

    def _rules(self) -> list[LearningRateScheduleCallback]:
        found = [c for c in callback_list.neighbours(self._container) if isinstance(c, LearningRateScheduleCallback)]
        return found or [self]

    def _agreed_steps(self) -> int:
        name = type(self).__name__
        everyone = allgather_object(self.params.get("steps"), name=f"{name}: steps per epoch")
        if None in everyone:
            raise ConfigurationError(
                f"Keras does not know how many steps an epoch has, and {name} needs it. Pass steps_per_epoch to it."
            )
        return max(everyone)


def _is(rules: list[LearningRateScheduleCallback], index: int | None, rule: LearningRateScheduleCallback) -> bool:
    return index is not None and rules[index] is rule


def _positive(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not value > 0:
        raise ConfigurationError(f"{what} must be a number above 0. Received: {value!r}.")
    return float(value)
