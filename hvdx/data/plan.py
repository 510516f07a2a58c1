"""Who gets how many samples in which step: pure functions of the numbers of samples and ranks and the batch size.

Rank r of N owns the samples r, r + N, r + 2N, ... in every epoch. So nothing is lost or repeated however each rank
shuffles its own, and without shuffling the ranks' batches of one step are together the batch of one process.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdx.errors import ConfigurationError


@dataclass(frozen=True)
class ShardPlan:
    """How `samples` samples become equally many steps on each of `size` ranks.

    Args:
        samples: number of samples in an epoch, over all ranks.
        size: number of ranks.
        batch_size: samples in a rank's batch.
        drop_remainder: whether only whole global batches are used; otherwise every sample is, and the last batches are
            smaller.

    Raises:
        ConfigurationError: no such plan exists, as a rank would be left without a sample in some step.
    """

    samples: int
    size: int
    batch_size: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        if self.samples < self.size:
            raise ConfigurationError(
                f"hvd.shard got {self.samples} sample(s) for {self.size} rank(s); each rank needs at least one. "
                "Give it more data or start fewer ranks."
            )
        if self.drop_remainder and self.steps == 0:
            raise ConfigurationError(
                f"hvd.shard got {self.samples} sample(s), less than one batch of {self.batch_size} on each of "
                f"{self.size} rank(s), and drop_remainder=True leaves none. Use a smaller batch_size, or "
                "drop_remainder=False."
            )
        if not self.drop_remainder and self.batch_size == 1 and self.samples % self.size:
            raise ConfigurationError(
                f"hvd.shard cannot deal {self.samples} samples to {self.size} ranks in batches of 1: in the last step "
                "a rank would have none, and the others would wait for it. Use drop_remainder=True (which leaves out "
                f"{self.samples % self.size} sample(s) an epoch) or a larger batch_size."
            )

    @property
    def steps(self) -> int:
        """Steps in an epoch; the same on every rank."""
        if self.drop_remainder:
            return self.samples // (self.size * self.batch_size)
        return -(-self.owned(0) // self.batch_size)

    def owned(self, rank: int) -> int:
        """Return how many samples rank `rank` owns; the ranks differ by one at most."""
        return (self.samples - rank + self.size - 1) // self.size

    def used(self, rank: int) -> int:
        """Return how many of them the rank uses in an epoch."""
        return self.steps * self.batch_size if self.drop_remainder else self.owned(rank)

    def batch_sizes(self, rank: int) -> list[int]:
        """Return the size of each of the rank's batches: full but for the last, and none empty.

        In one step the ranks' batches differ by one sample at most.
        """
        full, last = self.steps - 1, self.used(rank) - (self.steps - 1) * self.batch_size
        if last:
            return [self.batch_size] * full + [last]
        # Another rank has one sample more, which opens a step: this rank keeps one sample for it.
        return [self.batch_size] * (full - 1) + [self.batch_size - 1, 1]

    def describe(self) -> str:
        """Return the plan in words."""
        last = sorted({self.batch_sizes(rank)[-1] for rank in range(self.size)}, reverse=True)
        text = (
            f"{self.samples:,} samples over {self.size} rank{'s' if self.size > 1 else ''}: {self.steps:,} "
            f"step{'s' if self.steps > 1 else ''} an epoch, each {self.batch_size:,} samples a rank"
        )
        if self.drop_remainder:
            left = self.samples - self.steps * self.batch_size * self.size
            return f"{text}; {left:,} left out" if left else text
        return text if last == [self.batch_size] else f"{text}, the last {' or '.join(f'{n:,}' for n in last)}"
