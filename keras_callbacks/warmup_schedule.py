"""The learning-rate rules of the callbacks as a `LearningRateSchedule`, for custom loops, which have no callbacks."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx import world
from hvdx.errors import ConfigurationError
from hvdx.ops.convert import to_tensor
from keras_callbacks.schedules import Multiplier, rate_at_step


def warmup_schedule(
    initial_lr: float,
    warmup_epochs: float = 5,
    *,
    steps_per_epoch: int,
    multiplier: Multiplier = 1.0,
    staircase: bool = True,
    size: int | None = None,
    keras: Any = None,
) -> Any:
    """Return a `LearningRateSchedule`: a warm-up to `initial_lr`, then `initial_lr` times `multiplier`; not collective.

    Its rates are those of LearningRateWarmupCallback and LearningRateScheduleCallback. A momentum correction is not
    part of it: a schedule knows nothing of the optimizer's buffers.

    Args:
        initial_lr: the rate at the end of the warm-up; as a rule the rate of one process times hvd.size().
        warmup_epochs: number of epochs; 0 means no warm-up.
        steps_per_epoch: updates in an epoch.
        multiplier: a function of the epoch, or a number m, which means m ** (epoch - warmup_epochs). With a function
            the schedule cannot be saved.
        staircase: whether the multiplier gets whole epochs (True) or a fraction at every step.
        size: number of ranks; hvd.size() where it is None.
        keras: the module keras or tf_keras whose optimizer it is for; None takes the one that has been imported, and
            `keras` if both have.

    Raises:
        ConfigurationError: an option has no meaning.
    """
    for name, value in (("initial_lr", initial_lr), ("steps_per_epoch", steps_per_epoch)):
        if not value > 0:
            raise ConfigurationError(f"{name} must be above 0. Received: {value!r}.")
    if warmup_epochs < 0:
        raise ConfigurationError(f"warmup_epochs is a number of epochs, 0 or more. Received: {warmup_epochs!r}.")
    name = keras.__name__ if keras is not None else "tf_keras" if _only_tf_keras() else "keras"
    return _schedule_class(name)(
        initial_lr, world.size() if size is None else size, warmup_epochs, steps_per_epoch, multiplier, staircase
    )


def _only_tf_keras() -> bool:
    return "tf_keras" in sys.modules and "keras" not in sys.modules


@functools.cache
def _schedule_class(module: str) -> Any:
    """Return the schedule's class for one Keras; a class, as each Keras asks for a subclass of its own."""
    keras = importlib.import_module(module)
    base = keras.optimizers.schedules.LearningRateSchedule

    @keras.saving.register_keras_serializable("hvdx")
    class WarmupSchedule(base):  # type: ignore[valid-type, misc]
        """See `warmup_schedule`."""

        def __init__(
            self,
            initial_lr: float,
            size: int,
            warmup_epochs: float,
            steps_per_epoch: int,
            multiplier: Multiplier,
            staircase: bool,
        ) -> None:
            super().__init__()
            self._config: dict[str, Any] = {
                "initial_lr": initial_lr,
                "size": size,
                "warmup_epochs": warmup_epochs,
                "steps_per_epoch": steps_per_epoch,
                "multiplier": multiplier,
                "staircase": staircase,
            }

        def __call__(self, step: Any) -> Any:
            def rate(value: Any) -> Any:
                return np.float32(rate_at_step(int(value), **self._config))

            result = tf.numpy_function(rate, [to_tensor(step)], tf.float32, stateful=False)
            result.set_shape([])
            return result

        def get_config(self) -> dict[str, Any]:
            if callable(self._config["multiplier"]):
                raise ConfigurationError(
                    "A schedule whose multiplier is a function cannot be saved. Pass a number, or save the weights "
                    "only."
                )
            return dict(self._config)

    return WarmupSchedule
