"""docs/scaling.md: each command prints today what the page shows."""

from __future__ import annotations

import re
import shlex

import pytest

from hvdx import cli
from tests.support.jobs import ROOT

BLOCKS = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / "scaling.md").read_text(), re.DOTALL)
COMMANDS = [part.split("\n", 1) for block in BLOCKS for part in block.split("$ ")[1:]]


def filtered(text: str, command: str) -> str:
    """Do what `| grep [-E] PATTERN` at the end of a command does."""
    if "|" not in shlex.split(command):
        return text
    pattern = shlex.split(command)[-1]
    pattern = pattern if " -E " in command else re.escape(pattern)
    return "\n".join(line for line in text.splitlines() if re.search(pattern, line))


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=range(len(COMMANDS)))
def test_the_page_shows_what_the_command_prints(
    command: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    words = shlex.split(command)
    assert words[:2] == ["hvdx", "plan"]
    assert cli.main(words[1 : words.index("|") if "|" in words else None]) == 0
    printed = filtered(capsys.readouterr().out, command)
    assert [line.rstrip() for line in printed.strip().splitlines()] == [
        line.rstrip() for line in shown.strip().splitlines()
    ]


def test_the_page_has_its_commands() -> None:
    assert len(COMMANDS) >= 10
