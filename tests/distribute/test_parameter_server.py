"""The parameter server with real processes: two servers, two workers, many scenes in one start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.distribute.parameter_server_jobs import Job, job
from tests.distribute.parameter_server_recipes import cases, classes, name_of
from tests.training.support import FAMILIES

SCENES = ["reductions", "rows", "refusals", "strangers", "counted", "again", "gathered"]
FITS = [f"converging-{family}" for family in FAMILIES]
RECIPES = [name_of(recipe, family) for recipe, family in cases()]
CLASSES = [f"{name}-{family}" for family in FAMILIES for name in classes(family)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job in which all scenes have been played."""
    with job(tmp_path_factory.mktemp("played"), [*SCENES, "converging", "optimizers", "recipes"]) as running:
        codes = running.wait([*running.workers, *running.servers], 900)
        assert codes == [0, 0, 0, 0], running.everything()
        yield running


@pytest.mark.timeout(960)
@pytest.mark.parametrize("name", SCENES + FITS + CLASSES + RECIPES)
def test_scene(played: Job, name: str) -> None:
    for worker in (0, 1):
        outcome = played.outcomes(worker).get(name, "was not played")
        assert not outcome, f"worker {worker}:\n{outcome}"


def test_a_worker_that_dies_holds_nobody_back_for_long(tmp_path: Path) -> None:
    with job(tmp_path, ["killed"], TEST_SILENCE="8") as running:
        assert running.wait(running.workers, 120) == [0, -9], running.everything()
        assert running.wait(running.servers, 30) == [0, 0], running.everything()
        assert running.outcomes(0) == {"killed": ""}
        assert "worker 1 is gone: no sign of life" in running.output(running.servers[0])


def test_a_server_dies_and_three_go_on_from_the_saved_state(tmp_path: Path) -> None:
    with job(tmp_path, ["until_saved"]) as running:
        end = time.monotonic() + 120
        while not all((tmp_path / f"saved-{worker}").exists() for worker in (0, 1)):
            assert time.monotonic() < end, running.everything()
            time.sleep(0.1)
        running.servers[1].kill()
        while len(running.outcomes(0)) + len(running.outcomes(1)) < 2:
            assert time.monotonic() < end, running.everything()
            time.sleep(0.1)
        for worker in (0, 1):
            assert running.outcomes(worker) == {"until_saved": ""}
    with np.load(tmp_path / "state.npz") as file:  # numpy alone reads it
        assert file["0"].shape == (6, 2)
    for path in tmp_path.glob("*.address"):
        path.unlink()
    with job(tmp_path, ["from_saved"], servers=3) as running:
        assert running.wait([*running.workers, *running.servers], 120) == [0] * 5, running.everything()
        for worker in (0, 1):
            assert running.outcomes(worker) == {"from_saved": ""}
