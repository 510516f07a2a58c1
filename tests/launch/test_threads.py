"""Dividing the cores of a host between its ranks."""

from __future__ import annotations

import pytest

from hvdx.launch.threads import describe, divide, quota_cores


@pytest.mark.parametrize(
    ("cores", "ranks", "each"), [(8, 2, 4), (8, 3, 2), (2, 2, 1), (2, 4, 1), (1, 1, 1), (64, 1, 64)]
)
def test_cores_are_divided(cores: int, ranks: int, each: int) -> None:
    plan = divide(cores, ranks, {})
    assert plan.assign == {
        "OMP_NUM_THREADS": str(each),
        "TF_NUM_INTRAOP_THREADS": str(each),
        "TF_NUM_INTEROP_THREADS": str(max(2, each)),
        "HVDX_THREADS_PER_RANK": str(each),
    }


def test_the_command_line_wins_over_the_variable_and_both_over_the_division() -> None:
    assert divide(8, 2, {"HVDX_THREADS_PER_RANK": "3"}).threads == 3
    assert divide(8, 2, {"HVDX_THREADS_PER_RANK": "3"}, threads=5).threads == 5
    assert divide(8, 2, {"HVDX_THREADS_PER_RANK": "many"}).threads == 4


def test_what_the_user_set_stays_and_is_said() -> None:
    plan = divide(8, 2, {"OMP_NUM_THREADS": "7"})
    assert "OMP_NUM_THREADS" not in plan.assign
    assert plan.assign["TF_NUM_INTRAOP_THREADS"] == "4"
    assert describe(plan, 8, 2) == "2 ranks share 8 cores: 4 threads each; kept as you set them: OMP_NUM_THREADS=7"


def test_the_sentence() -> None:
    assert describe(divide(2, 2, {}), 2, 2) == "2 ranks share 2 cores: 1 thread each"
    assert describe(divide(1, 1, {}), 1, 1) == "1 rank has 1 core: 1 thread"
    assert describe(divide(8, 2, {}, 3), 8, 2) == "2 ranks share 8 cores: 3 threads each as asked"


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000", 2), ("50000 100000", 1), ("max 100000", None), ("-1 100000", None), ("", None), ("1 0", None)],
)
def test_a_containers_quota(text: str, cores: int | None) -> None:
    assert quota_cores(text) == cores
