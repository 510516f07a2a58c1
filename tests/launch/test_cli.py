"""The command `hvdx`: env shows values and where they come from, doctor reports what is broken and survives it."""

from __future__ import annotations

import os
import sys

import pytest

from hvdx import cli, environment
from hvdx.launch import doctor
from hvdx.launch.doctor import Check, State


def test_env_shows_each_value_and_its_origin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVDX_COMM", "single")
    monkeypatch.delenv("HVDX_FUSION_THRESHOLD", raising=False)
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "4242")
    assert cli.main(["env"]) == 0
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert {variable.name for variable in environment.ALL} <= set(rows)
    assert rows["HVDX_COMM"].split("│")[2].strip() == "single"
    assert "4242" in rows["HVDX_FUSION_THRESHOLD"]
    assert rows["HVDX_FUSION_THRESHOLD"].split("│")[3].strip() == "HOROVOD_FUSION_THRESHOLD"


def test_env_marks_what_cannot_be_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HVDX_TIMEOUT", "soon")
    assert cli.main(["env"]) == 1
    assert "soon: cannot be used" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("hvdx ")


@pytest.mark.parametrize(("state", "code"), [(State.FINE, 0), (State.NOTE, 0), (State.BAD, 1)])
def test_doctors_exit_code(
    state: State, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "report", lambda: [Check("thing", state, "[odd] text")])
    assert cli.main(["doctor"]) == code
    said = capsys.readouterr().out
    assert "[odd] text" in said
    assert ("In the way of training: thing" in said) == bool(code)


def test_a_question_that_crashes_hangs_or_babbles_is_a_reason_not_an_end() -> None:
    environ = dict(os.environ)
    assert doctor.ask("print('noise'); print('[1]')", environ) == ([1], "")
    assert doctor.ask("import os; os.abort()", environ)[0] is None
    assert "no answer within" in doctor.ask("import time; time.sleep(60)", environ, limit=1.0)[1]
    assert doctor.ask("print('x')", environ) == (None, "unexpected answer 'x'")
    assert doctor.ask("import no_such_module", environ)[1].startswith("ModuleNotFoundError")


def test_the_whole_report(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    # Stand-ins keep it short: a broken TensorFlow, an absent tf_keras, a Keras that works.
    stand_ins = os.fspath(tmp_path)
    for name, text in {"tensorflow": "raise OSError('libfoo.so is missing')", "keras": "__version__ = '9.9'"}.items():
        with open(os.path.join(stand_ins, f"{name}.py"), "w") as file:
            file.write(text)
    root = os.path.dirname(os.path.dirname(os.path.abspath(cli.__file__)))
    checks = {check.name: check for check in doctor.report({**os.environ, "PYTHONPATH": f"{stand_ins}:{root}"})}
    assert checks["tensorflow"] == Check("tensorflow", State.BAD, "cannot be imported: OSError: libfoo.so is missing")
    assert checks["keras"] == Check("keras", State.FINE, "9.9")
    assert checks["python"].found.endswith(sys.executable)
    assert checks["MPI library"].state is State.FINE
    assert checks["two ranks"] == Check("two ranks", State.FINE, "started and added their numbers")
