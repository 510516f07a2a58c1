"""The drawings of the reduction algorithms: what is in docs/images is what the algorithms do today."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hvdx.comm.algorithms import ALGORITHMS
from tests.support.jobs import ROOT

SCRIPT = ROOT / "scripts" / "draw_all_reduce.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("draw_all_reduce", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["draw_all_reduce"] = module
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_drawing_in_the_documents_is_up_to_date(script: ModuleType, name: str) -> None:
    path: Path = script.FOLDER / f"all-reduce-{name.replace('_', '-')}.svg"
    assert path.read_text() == script.draw(name), "run python scripts/draw_all_reduce.py"


def test_what_is_recorded_of_a_tree(script: ModuleType) -> None:
    recorders = script.record("tree")
    arrows = sorted((a.step, a.source, a.destination, a.first, a.count) for r in recorders for a in r.arrows)
    assert arrows == [
        (0, 1, 0, 0, 4),
        (0, 3, 2, 0, 4),
        (1, 2, 0, 0, 4),
        (2, 0, 2, 0, 4),
        (3, 0, 1, 0, 4),
        (3, 2, 3, 0, 4),
    ]
    assert [recorders[0].at(step) for step in range(3)] == [[1] * 4, [2] * 4, [4] * 4]
    assert recorders[1].at(3) == [1] * 4
    assert recorders[1].at(9) == [4] * 4
