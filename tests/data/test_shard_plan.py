"""Plans: every sample once, equally many steps, no empty batch, for all small numbers."""

from __future__ import annotations

import pytest

import hvdx as hvd
from hvdx.data.plan import ShardPlan


def plans(drop_remainder: bool) -> list[ShardPlan]:
    """Return every plan of few samples, ranks and batch sizes that exists."""
    found = []
    for samples in range(1, 40):
        for size in (1, 2, 3, 4):
            for batch_size in (1, 2, 3, 5, 50):
                try:
                    found.append(ShardPlan(samples, size, batch_size, drop_remainder))
                except hvd.ConfigurationError:
                    continue
    return found


def test_every_sample_is_used_once_in_equally_many_steps() -> None:
    found = plans(drop_remainder=False)
    assert len(found) > 500
    for plan in found:
        sizes = [plan.batch_sizes(rank) for rank in range(plan.size)]
        assert sum(map(sum, sizes)) == plan.samples, plan
        assert {len(s) for s in sizes} == {plan.steps}, plan
        assert all(1 <= n <= plan.batch_size for s in sizes for n in s), plan
        for step in zip(*sizes, strict=True):
            assert max(step) - min(step) <= 1, plan


def test_all_batches_but_the_last_are_full_where_that_leaves_nobody_empty() -> None:
    for plan in plans(drop_remainder=False):
        in_last_step = plan.samples - (plan.steps - 1) * plan.batch_size * plan.size
        if in_last_step >= plan.size:
            for rank in range(plan.size):
                assert plan.batch_sizes(rank)[:-1] == [plan.batch_size] * (plan.steps - 1), plan


def test_drop_remainder_uses_whole_global_batches_only() -> None:
    found = plans(drop_remainder=True)
    assert len(found) > 300
    for plan in found:
        assert plan.steps == plan.samples // (plan.batch_size * plan.size)
        for rank in range(plan.size):
            assert plan.batch_sizes(rank) == [plan.batch_size] * plan.steps
            assert plan.used(rank) <= plan.owned(rank)


def test_by_hand() -> None:
    assert [ShardPlan(11, 2, 4).batch_sizes(rank) for rank in (0, 1)] == [[4, 2], [4, 1]]
    # 9 = 4 + 4 + 1: rank 1 keeps one of its samples for the third step
    assert [ShardPlan(9, 2, 2).batch_sizes(rank) for rank in (0, 1)] == [[2, 2, 1], [2, 1, 1]]
    assert ShardPlan(1437, 2, 64).describe() == (
        "1,437 samples over 2 ranks: 12 steps an epoch, each 64 samples a rank, the last 15 or 14"
    )
    assert ShardPlan(8, 2, 4).describe() == "8 samples over 2 ranks: 1 step an epoch, each 4 samples a rank"
    assert ShardPlan(10, 1, 4, True).describe().endswith("each 4 samples a rank; 2 left out")


@pytest.mark.parametrize(
    ("samples", "size", "batch_size", "drop", "words"),
    [
        (1, 2, 8, False, r"1 sample\(s\) for 2 rank\(s\)"),
        (0, 1, 8, False, r"0 sample\(s\) for 1 rank"),
        (7, 2, 4, True, r"less than one batch of 4 on each of 2 rank.*drop_remainder=False"),
        (9, 2, 1, False, r"in batches of 1.*drop_remainder=True"),
    ],
)
def test_what_cannot_be_planned(samples: int, size: int, batch_size: int, drop: bool, words: str) -> None:
    with pytest.raises(hvd.ConfigurationError, match=words):
        ShardPlan(samples, size, batch_size, drop)
