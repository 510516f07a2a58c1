"""The horovod communicator in processes of its own: under every launcher, clean ends, and every way to fail."""

from __future__ import annotations

import importlib.util

import pytest

from tests.comm.native_jobs import complaints, horovodrun, hvdxrun, left_over

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not built here: scripts/build_horovod.sh"
)


def test_clean_ends_leave_nothing_and_alarm_nobody() -> None:
    for _ in range(3):
        job = hvdxrun("nothing", HVDX_COMM="horovod")
        assert job.code == 0, job.output
        assert complaints(job) == []
        assert "rank 1 of 2 by horovod" in job.output
        assert left_over(job) == []


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_horovodrun_is_recognized_and_works(controller: str) -> None:
    job = horovodrun(controller, "again")
    assert job.code == 0, job.output
    assert "rank 0 of 2 by horovod" in job.output
    assert "rank 1 of 2 by horovod" in job.output


def test_the_tensorflow_communicator_works_under_horovodrun_with_gloo() -> None:
    job = horovodrun("gloo", "nothing", HVDX_COMM="tensorflow")
    assert job.code == 0, job.output
    assert "rank 1 of 2 by tensorflow" in job.output


def test_hvdxrun_is_not_taken_for_horovodrun() -> None:
    job = hvdxrun("nothing", NCCL_SOCKET_IFNAME="lo", HOROVOD_CYCLE_TIME="1")
    assert job.code == 0, job.output
    assert "rank 1 of 2 by horovod" not in job.output


@pytest.mark.parametrize("scene", ["stop", "stop_in_graph", "stop_in_payload"])
@pytest.mark.parametrize("launcher", ["hvdxrun", "gloo"])
def test_a_stopped_rank_is_named_after_the_limit(scene: str, launcher: str) -> None:
    job = hvdxrun(scene, HVDX_COMM="horovod") if launcher == "hvdxrun" else horovodrun(launcher, scene)
    assert job.code != 0, job.output
    assert "rank 1 " + ("stopped in the middle" if scene == "stop_in_payload" else "did not come") in job.output
    assert "weights 20000000 float32" in job.output if scene == "stop_in_payload" else "weights 3 float32" in job.output
    assert job.seconds < 120
    assert left_over(job) == []


@pytest.mark.parametrize(("scene", "code", "words"), [("error", 1, "a mistake in the program"), ("death", 7, "code 7")])
def test_a_rank_that_fails_ends_the_others(scene: str, code: int, words: str) -> None:
    job = hvdxrun(scene, HVDX_COMM="horovod", HVDX_TIMEOUT="600")
    assert job.code == code, job.output
    assert words in job.output
    assert left_over(job) == []


def test_a_rank_that_ends_early_is_noticed() -> None:
    job = hvdxrun("leave_early", HVDX_COMM="horovod", HVDX_TIMEOUT="600")
    assert job.code == 1, job.output
    assert "rank 1: leaving: the end of the program" in job.output


def test_exit_codes_are_kept() -> None:
    job = hvdxrun("exit_code", HVDX_COMM="horovod")
    assert job.code == 3, job.output
