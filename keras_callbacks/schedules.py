"""Learning-rate rules as pure functions of base rate, epoch and step, so that a resumed run follows the same curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Multiplier = float | Callable[[float], float]


@dataclass(frozen=True)
class Window:
    """The epochs in which a rule sets the rate: from `start` up to and without `end` (None: for ever)."""

    start: float = 0
    end: float | None = None

    def contains(self, epoch: int) -> bool:
        """Return whether the rule sets the rate in this epoch."""
        return self.start <= epoch and (self.end is None or epoch < self.end)

    def is_over(self, epoch: int) -> bool:
        """Return whether the rule has had its time before this epoch."""
        return self.end is not None and epoch >= self.end


def multiplied(epoch: float, multiplier: Multiplier, start: float = 0) -> float:
    """Return what the base rate is multiplied by at an epoch (with a fraction where it changes every step).

    Args:
        epoch: epochs since the start of the training.
        multiplier: a function of the epoch, or a number m, which means m ** (epoch - start).
        start: the epoch at which a number begins to count.
    """
    return float(multiplier(epoch)) if callable(multiplier) else float(multiplier) ** (epoch - start)


def warmup_multiplier(epoch: float, size: int, warmup_epochs: float, steps_per_epoch: int) -> float:
    """Return what the scaled rate is multiplied by during warm-up: a line from about 1 / size to exactly 1.

    Args:
        epoch: epochs since the start, with a fraction.
        size: number of ranks.
        warmup_epochs: after how many epochs 1 is reached.
        steps_per_epoch: steps in an epoch; the last step of the warm-up has multiplier 1.

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2 (gradual warm-up).
    """
    if warmup_epochs <= 0:
        return 1.0
    progress = min((epoch + 1 / steps_per_epoch) / warmup_epochs, 1.0)
    return (1 + (size - 1) * progress) / size


def in_charge(windows: Sequence[Window], epoch: int) -> int | None:
    """Return which of several rules sets the rate in an epoch: the last in the list whose window contains it."""
    return next((i for i in reversed(range(len(windows))) if windows[i].contains(epoch)), None)


def last_in_charge(windows: Sequence[Window], epoch: int) -> int | None:
    """Return whose last rate is still in force in an epoch that no window contains: the one that ended last."""
    over = [i for i, window in enumerate(windows) if window.is_over(epoch)]
    return max(over, key=lambda i: (windows[i].end or 0, i)) if over and in_charge(windows, epoch) is None else None


def rate_at_step(
    step: int,
    initial_lr: float,
    size: int,
    warmup_epochs: float,
    steps_per_epoch: int,
    multiplier: Multiplier = 1.0,
    staircase: bool = True,
) -> float:
    """Return the rate of a step counted from 0: a warm-up, then `initial_lr` times the multiplier.

    The same as LearningRateWarmupCallback and, from `warmup_epochs` on, LearningRateScheduleCallback.
    """
    epoch = step / steps_per_epoch
    if step // steps_per_epoch < warmup_epochs:  # a rule is in charge of whole epochs
        return initial_lr * warmup_multiplier(epoch, size, warmup_epochs, steps_per_epoch)
    return initial_lr * multiplied(step // steps_per_epoch if staircase else epoch, multiplier, warmup_epochs)
