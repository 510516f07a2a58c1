"""What the tests of Estimators on several ranks share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.estimator.watching import shared_folder


@pytest.fixture
def folder(world: Any, tmp_path: Path) -> Iterator[Path]:
    """The model_dir of rank 0, given to all ranks; it does not exist yet."""
    path = shared_folder(world, tmp_path)
    yield path
    world.barrier()
    if world.rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
