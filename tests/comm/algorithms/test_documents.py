"""docs/all-reduce.md: its program prints what the page says."""

from __future__ import annotations

import re

import pytest

from tests.support.jobs import ROOT


def test_the_program_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "all-reduce.md").read_text()
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert found is not None
    exec(compile(found.group(1), "docs/all-reduce.md", "exec"), {})
    assert capsys.readouterr().out == found.group(2)


def test_the_drawings_it_shows_exist() -> None:
    text = (ROOT / "docs" / "all-reduce.md").read_text()
    images = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(images) >= 5
    assert all((ROOT / "docs" / image).exists() for image in images)
