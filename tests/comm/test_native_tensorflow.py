"""The tensorflow communicator in processes of its own: ways to start, clean ends, and every way to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hvdx.comm.addresses import free_port
from tests.comm import native_jobs
from tests.comm.native_jobs import PROGRAM, complaints, environment, hvdxrun, left_over


def test_clean_ends_leave_nothing_and_alarm_nobody() -> None:
    for _ in range(3):
        job = hvdxrun("nothing", HVDX_COMM="tensorflow")
        assert job.code == 0, job.output
        assert complaints(job) == []
        assert "rank 1 of 2 by tensorflow" in job.output
        assert job.output.count("TF_CONFIG not set") == 2
        assert left_over(job) == []


def test_the_world_can_be_left_and_joined_again() -> None:
    job = hvdxrun("again", ranks=3, HVDX_COMM="tensorflow")
    assert job.code == 0, job.output
    assert complaints(job) == []


def test_tf_config_of_the_user_needs_no_launcher_and_is_kept() -> None:
    cluster = {"chief": [f"localhost:{free_port()}"], "worker": [f"localhost:{free_port()}"]}
    processes = []
    for job, index in (("chief", 0), ("worker", 0)):
        config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
        environ = environment(HVDX_COMM="tensorflow", TF_CONFIG=config)
        processes.append(
            subprocess.Popen(
                [sys.executable, PROGRAM, "nothing"], env=environ, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    try:
        outputs = [process.communicate(timeout=native_jobs.LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "rank 0 of 2" in outputs[0]
    assert "rank 1 of 2" in outputs[1]
    assert '"type": "chief"' in outputs[0].splitlines()[-1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_named_with_its_address(rank: int) -> None:
    addresses = [f"localhost:{free_port()}", f"localhost:{free_port()}"]
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    job = native_jobs.run(
        [sys.executable, PROGRAM, "nothing"],
        HVDX_COMM="tensorflow",
        TF_CONFIG=json.dumps(config),
        HVDX_START_TIMEOUT="4",
    )
    assert job.code == 1, job.output
    assert "StallError" in job.output
    assert f"ank {1 - rank} at {addresses[1 - rank]}" in job.output


def test_init_that_comes_too_late_says_so() -> None:
    job = hvdxrun("too_late", HVDX_COMM="tensorflow")
    assert job.code == 1, job.output
    assert "ConfigurationError" in job.output
    assert "Call hvd.init() first" in job.output


@pytest.mark.parametrize("scene", ["stop", "stop_in_graph", "stop_in_payload"])
def test_a_stopped_rank_is_named_after_the_limit(scene: str) -> None:
    job = hvdxrun(scene, HVDX_COMM="tensorflow")
    assert job.code != 0, job.output
    # TensorFlow's own end of a payload may be a crash: what has to be said has been said before
    assert "StallError" in job.output or scene == "stop_in_payload"
    assert "rank 1 " + ("stopped in the middle" if scene == "stop_in_payload" else "did not come") in job.output
    assert "weights 20000000 float32" in job.output if scene == "stop_in_payload" else "weights 3 float32" in job.output
    assert job.seconds < 120
    assert left_over(job) == []


@pytest.mark.parametrize(("scene", "code", "words"), [("error", 1, "a mistake in the program"), ("death", 7, "code 7")])
def test_a_rank_that_fails_ends_the_others(scene: str, code: int, words: str) -> None:
    job = hvdxrun(scene, HVDX_COMM="tensorflow", HVDX_TIMEOUT="600")
    assert job.code == code, job.output
    assert words in job.output
    assert left_over(job) == []


def test_a_rank_that_ends_early_is_noticed() -> None:
    job = hvdxrun("leave_early", HVDX_COMM="tensorflow", HVDX_TIMEOUT="600")
    assert job.code == 1, job.output
    assert "rank 1: leaving: the end of the program" in job.output


def test_exit_codes_are_kept() -> None:
    job = hvdxrun("exit_code", HVDX_COMM="tensorflow")
    assert job.code == 3, job.output
    assert "TF_CONFIG" not in os.environ
