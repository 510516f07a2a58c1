"""`strategy("multi_worker")` in plain processes that only TF_CONFIG tells of each other: no launcher, no hvd.init()."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest

from hvdx.comm.addresses import free_port
from tests.conftest import installed_kerases
from tests.support.jobs import Job, run_by_hand

COMMAND = ["-m", "tests.distribute.multi_worker_program", "hvdx"]
LIMIT = "10"


@dataclass(frozen=True)
class Ended:
    """How the workers ended: of a whole cluster, and, with the word for who is missing, of two that are not."""

    whole: list[Job]
    waited: list[tuple[str, Job]]


@pytest.fixture(scope="module")
def ended() -> Ended:
    """Three clusters at the same time: a whole one, one whose last worker never starts, one whose first never does."""
    whole, last, first = ([f"127.0.0.1:{free_port()}" for _ in range(count)] for count in (2, 3, 2))
    places = [(whole, 0), (whole, 1), (last, 0), (last, 1), (first, 1)]
    members = [
        {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})}
        for workers, index in places
    ]
    jobs = run_by_hand(
        [own | ({} if at < 2 else {"HVDX_START_TIMEOUT": LIMIT}) for at, own in enumerate(members)], COMMAND
    )
    missing = [f"Missing: rank 2 at {last[2]}."] * 2 + [f"Rank 0 at {first[0]} did not give the start"]
    return Ended(jobs[:2], list(zip(missing, jobs[2:], strict=True)))


@pytest.mark.timeout(240)
def test_trains_as_one_process_with_the_union_of_the_batches(ended: Ended) -> None:
    for rank, job in enumerate(ended.whole):
        assert job.code == 0, job.output
        lines = job.output.splitlines()
        [found] = [json.loads(line.removeprefix("FOUND ")) for line in lines if line.startswith("FOUND ")]
        assert sorted(found) == sorted(installed_kerases())
        assert all(difference < 1e-5 for difference in found.values()), found
        assert f"  ranks: 2 (this is rank {rank})" in lines
        assert "  replicas in sync: 2" in lines
        assert "  gradients move by: tensorflow between ranks" in lines
        assert any(re.fullmatch(r"  strategy made by: hvdx \d.*", line) for line in lines), lines


@pytest.mark.timeout(240)
def test_a_worker_that_never_starts_is_named_by_all_others(ended: Ended) -> None:
    for missing, job in ended.waited:
        assert job.code == 1, job.output
        [*_, last] = job.output.splitlines()
        assert "StallError" in last, job.output
        assert missing in last, job.output
        assert f"within {LIMIT} s (HVDX_START_TIMEOUT)" in last, job.output
        assert job.seconds < 90, job.seconds
