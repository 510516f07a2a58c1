"""Bad input to hvdxrun: one sentence, exit code 2, nothing started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdx.launch import hvdxrun


@pytest.mark.parametrize(
    ("line", "understood", "write"),
    [
        ("-np 2", "The command is missing", "hvdxrun -np 2 python train.py"),
        ("true", "number of ranks is missing", "hvdxrun -np 2 python train.py"),
        ("-np two true", "-np 'two' is no number of ranks", "-np 2"),
        ("-np 0 true", "-np '0'", "-np 2"),
        ("-np -1 true", "-np '-1'", "-np 2"),
        ("-np 2 no-such-program", "'no-such-program' cannot be run", "no such program on PATH"),
        ("-np 2 /tmp", "'/tmp' cannot be run", "it is a folder"),
        ("-np 2 -H a b true", "'b' cannot be run", "-H a,b"),
        ("-np 2 -H a, b true", "empty place between its commas", "-H a:2,b:2"),
        ("-np 3 -H localhost:2 true", "more ranks than the hosts have slots", "-np 2"),
        ("-np 2 -H localhost:0 true", "'0' is no number of slots", "a:2"),
        ("-np 2 -H a:1 --hostfile x true", "both given", "one of them"),
        ("-np 2 --hostfile /no/such/file true", "/no/such/file cannot be read", "No such file"),
        ("-np 2 --start-timeout soon true", "'soon' is no time", "--start-timeout 120"),
        ("-np 2 --threads-per-rank 0 true", "--threads-per-rank '0'", "--threads-per-rank 2"),
        ("-np 2 -p ssh true", "-p 'ssh' is no number of a port", "-p 2"),
        ("-np 2 -i /no/such/key true", "/no/such/key", "cannot be read"),
        ("-np 2 -x NO_SUCH_VARIABLE_HERE true", "not set here", "-x NO_SUCH_VARIABLE_HERE=VALUE"),
        ("-np 2 -x 1+1=2 true", "is no variable", "-x NAME=VALUE"),
        ("-np 2 --no-such-option true", "--no-such-option", "hvdxrun -h"),
        ("-np", "-np", "hvdxrun -h"),
    ],
)
def test_one_sentence_and_code_2(line: str, understood: str, write: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hvdxrun.main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("hvdxrun: ")
    assert len(said.err.splitlines()) == 1
    assert understood in said.err
    assert write in said.err


def test_hosts_with_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    assert hvdxrun.main(["-np", "2", "-H", "a b", "true"]) == 2
    assert "Write -H a,b" in capsys.readouterr().err


def test_a_script_that_is_not_executable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("print()")
    assert hvdxrun.main(["-np", "2", str(script)]) == 2
    assert f"not executable; for a Python program write: python {script}" in capsys.readouterr().err


def test_output_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert hvdxrun.main(["-np", "2", "--output-filename", str(tmp_path / "file" / "x"), "true"]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_another_family_on_path_is_not_used(
    fake_mpirun: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fake_mpirun("HYDRA build details:\n    Version:  5.0.2")
    monkeypatch.setenv("PATH", folder + os.pathsep + os.environ["PATH"])
    assert hvdxrun.main(["-np", "2", "--dry-run", sys.executable, "x.py"]) == 0
    assert f"{Path(sys.executable).parent}/mpirun -np 2" in capsys.readouterr().out


def test_another_family_alone_is_refused(
    fake_mpirun: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = fake_mpirun("HYDRA build details:\n    Version:  5.0.2")
    monkeypatch.setenv("PATH", folder)
    monkeypatch.setattr(hvdxrun.probe, "launchers", _only_on_path(hvdxrun.probe.launchers))
    assert hvdxrun.main(["-np", "2", sys.executable, "x.py"]) == 2
    said = capsys.readouterr().err
    assert f"{folder}/mpirun is of MPICH" in said
    assert "every rank would believe to be alone" in said


def _only_on_path(launchers: Callable[..., object]) -> Callable[..., object]:
    return lambda environ, pythons: launchers(environ, [])


def test_no_mpi_anywhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(hvdxrun.probe, "launchers", _only_on_path(hvdxrun.probe.launchers))
    assert hvdxrun.main(["-np", "2", sys.executable, "x.py"]) == 2
    assert "No MPI was found" in capsys.readouterr().err


@pytest.mark.parametrize("first", ["#!/usr/bin/env python3", f"#!{sys.executable}"])
def test_the_python_of_a_script_is_found(first: str, tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text(first + "\n")
    script.chmod(0o755)
    path = str(Path(sys.executable).parent)
    found = hvdxrun.probe.python_of([str(script)], path)
    assert Path(found).parent == Path(sys.executable).parent


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        hvdxrun.main(["--version"])
    assert ended.value.code == 0
    with pytest.raises(SystemExit):
        hvdxrun.main(["-h"])
    said = capsys.readouterr().out
    assert said.startswith("hvdxrun ")
    assert "hvdxrun -np 4 -H alice:2,bob:2 python train.py" in said
