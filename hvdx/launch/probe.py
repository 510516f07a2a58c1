"""Asking this machine, in short processes with a time limit: which mpirun, which MPI library, which Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdx.launch.families import Launcher, Library, launcher_from, library_from

_LIMIT = 20.0
# MPI is loaded but not initialised, so this works beside a running job and costs 0.1 s.
_ASK_PYTHON = """
import sys
print(sys.executable)
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""
_PYTHON_NAME = re.compile(r"(python|pypy)[0-9.]*")


def run(command: Sequence[str], environ: Mapping[str, str], limit: float = _LIMIT) -> tuple[int | None, str, str]:
    """Run a short command; return exit code (None: not started, or too slow), output and errors."""
    try:
        done = subprocess.run(
            list(command), env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, text=True,
            errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, "", f"no answer within {limit:g} s"
    except OSError as error:
        return None, "", str(error)
    return done.returncode, done.stdout, done.stderr


def launchers(environ: Mapping[str, str], pythons: Sequence[str]) -> list[Launcher]:
    """Return the launchers found, the cluster's own first: on PATH, then beside each Python."""
    paths = [
        shutil.which("mpirun", path=environ.get("PATH", "")),
        shutil.which("mpiexec", path=environ.get("PATH", "")),
    ]
    paths += [str(Path(python).parent / "mpirun") for python in pythons]
    found: list[Launcher] = []
    for path in paths:
        if path is None or not os.access(path, os.X_OK) or any(path == other.path for other in found):
            continue
        search = environ.get("PATH", os.defpath) + os.pathsep + str(Path(path).parent)
        _, output, errors = run([path, "--version"], {**environ, "PATH": search})
        launcher = launcher_from(path, output + errors)
        if launcher is not None:
            found.append(launcher)
    return found


def ask_python(python: str, environ: Mapping[str, str]) -> tuple[str, Library | None]:
    """Return the path this Python gives itself, and the MPI library its mpi4py loads (None: none, or no answer)."""
    clean = {name: value for name, value in environ.items() if not name.startswith(("PMI_", "PMIX_", "OMPI_COMM_"))}
    _, output, _ = run([python, "-c", _ASK_PYTHON], clean)
    executable, _, version = output.partition("\n")
    return executable or python, library_from(version)


def python_of(command: Sequence[str], path: str) -> str:
    """Return the Python that the command runs: its first word, a script's first line, else this one.

    Args:
        command: the command with its program found (an absolute path, or a name on `path`).
        path: the search path.
    """
    program = shutil.which(command[0], path=path) or command[0]
    if _PYTHON_NAME.fullmatch(Path(program).name):
        return program
    try:
        with open(program, "rb") as file:
            first = file.readline(256).decode(errors="replace")
    except OSError:
        return sys.executable
    words = first[2:].split() if first.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if words and _PYTHON_NAME.fullmatch(Path(words[0]).name):
        return shutil.which(words[0], path=path) or sys.executable
    return sys.executable
