"""The table of targets, and how a run is judged by it."""

from __future__ import annotations

import pytest

from benchmarks.targets import ANY_MPI, OPEN_MPI, TARGETS, Target, What, judge
from tests.benchmarks.sections import section

SPEED = Target("2 ranks", "ResNet-50", What.SPEED, OPEN_MPI, 2.5)


@pytest.mark.parametrize(("theirs", "verdict"), [(2.5, "met"), (2.4, "NOT met")])
def test_speed(theirs: float, verdict: str) -> None:
    found = judge(SPEED, [section({"hvdx mpi": [1, 1, 1], "Horovod Open MPI (grouped)": [theirs] * 3})])
    assert (found.verdict, found.subject, found.rival) == (verdict, "hvdx mpi", "Horovod Open MPI (grouped)")
    assert found.ratio is not None
    assert found.ratio.middle == pytest.approx(theirs)


def test_shared_memory_is_judged_where_it_ran() -> None:
    times = {"hvdx mpi": [1] * 3, "hvdx shared_memory": [3] * 3, "Horovod Open MPI (grouped)": [4] * 3}
    assert judge(SPEED, [section(times)]).subject == "hvdx shared_memory"


def test_faster_means_more_than_as_fast() -> None:
    target = Target("fit, 2 ranks", "small CNN", What.SPEED, ("b",), 1, ("a",))
    assert judge(target, [section({"a": [1] * 3, "b": [1] * 3}, "fit, 2 ranks", "small CNN")]).verdict == "NOT met"
    assert judge(target, [section({"a": [1] * 3, "b": [1.01] * 3}, "fit, 2 ranks", "small CNN")]).verdict == "met"


def test_extra_time_is_compared_with_the_fastest_mpi() -> None:
    target = Target("2 ranks", "small CNN", What.EXTRA, ANY_MPI, 0.25)
    times = {
        "hvdx mpi": [1.5] * 3, "empty tf.function": [1] * 3, "Horovod MPICH (grouped)": [3] * 3,
        "Horovod Open MPI (grouped)": [9] * 3,
    }  # fmt: skip
    found = judge(target, [section(times, workload="small CNN")])
    assert (found.verdict, found.rival) == ("met", "Horovod MPICH (grouped)")
    del times["empty tf.function"]
    assert judge(target, [section(times, workload="small CNN")]).verdict.startswith("not measured: empty tf.function")


@pytest.mark.parametrize(("sent", "verdict"), [(1010, "met"), (1030, "NOT met"), (900, "NOT met")])
def test_traffic_is_that_of_the_host_that_sends_most(sent: float, verdict: str) -> None:
    target = Target("2 hosts x 2 ranks", "ResNet-50", What.TRAFFIC, (), 1.02)
    made = section({"hvdx mpi": [1] * 3}, "2 hosts x 2 ranks")  # 1000 bytes: 2 (H - 1) / H of them are 1000
    assert judge(target, [made]).verdict == "not measured: the link's counter is missing"
    made.sent = {"hvdx mpi": [[sent, 0]] * 3}
    assert judge(target, [made]).verdict == verdict


def test_noise_is_not_judged_but_its_ratio_is_told() -> None:
    quiet = {"hvdx mpi": [1.0] * 4, "Horovod Open MPI (grouped)": [9.0] * 4}
    made = section(quiet)
    assert judge(SPEED, [made]).verdict == "met"
    assert judge(SPEED, [made], ["a build was running"]).verdict == "not judged: a build was running"
    assert judge(SPEED, [section({**quiet, "hvdx mpi": [1.0, 2.0, 1.0, 2.0]})]).verdict == "met"  # either way
    unsteady = judge(SPEED, [section({**quiet, "hvdx mpi": [1.0, 6.0, 1.0, 6.0]})])
    assert unsteady.verdict == "not judged: hvdx mpi is unsteady"
    assert unsteady.ratio is not None
    made.busy = 2.0
    assert "others took" in judge(SPEED, [made]).verdict


def test_what_is_missing_is_named() -> None:
    assert judge(SPEED, []).verdict == "not measured: not part of the run"
    assert judge(SPEED, [section({"hvdx mpi": [1]})]).verdict == "not measured: Horovod Open MPI is missing"
    assert "did not run" in judge(SPEED, [section({"Horovod": [1]})]).verdict


def test_every_target_has_words_and_names_jobs_that_exist() -> None:
    from benchmarks.catalogue import REDUCTIONS, TRAININGS

    names = {kind.name for kind in (*REDUCTIONS, *TRAININGS)} | {"memory floor"}
    for target in TARGETS:
        assert {*target.against, *target.subjects} <= names
        assert str(target.limit) in target.wording() or target.limit in (1, 1.02)
