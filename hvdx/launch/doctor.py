"""What `hvdx doctor` finds: each check asks a process of its own, so that a broken piece cannot break the report."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hvdx.errors import LaunchError
from hvdx.launch import probe
from hvdx.launch.families import choose
from hvdx.launch.threads import cores_of_this_host

_IMPORT_LIMIT = 120.0
_START_LIMIT = 60.0


class State(Enum):
    """How a check ended: fine, absent but not needed, or in the way of training."""

    FINE = "ok"
    NOTE = "-"
    BAD = "bad"


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    state: State
    found: str


_VERSION = "import json, {0} as m; print(json.dumps(m.__version__))"
_HOROVOD = """
import json, horovod, horovod.tensorflow as h
built = {"MPI": h.mpi_built, "Gloo": h.gloo_built, "NCCL": h.nccl_built}
print(json.dumps([horovod.__version__, [name for name, ask in built.items() if ask()]]))
"""
_GPUS = """
import json, tensorflow as tf
print(json.dumps([tf.config.experimental.get_device_details(d).get("device_name", d.name)
                  for d in tf.config.list_physical_devices("GPU")]))
"""
_TWO_RANKS = "from mpi4py import MPI; c = MPI.COMM_WORLD; print('sum', c.allreduce(c.rank + 1), flush=True)"


def ask(source: str, environ: Mapping[str, str], limit: float = _IMPORT_LIMIT) -> tuple[object, str]:
    """Run a program that prints JSON; return its answer (None: none) and the reason in its last line of errors."""
    code, output, errors = probe.run([sys.executable, "-c", source], {**environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, limit)
    lines = output.strip().splitlines()
    if code == 0 and lines:
        try:
            return json.loads(lines[-1]), ""
        except ValueError:
            return None, f"unexpected answer {lines[-1]!r}"
    reason = (errors.strip().splitlines() or [f"ended with code {code} and said nothing"])[-1]
    return None, reason


def _absent(reason: str) -> bool:
    return reason.startswith("ModuleNotFoundError")


def _package(module: str, needed: str, environ: Mapping[str, str]) -> Check:
    version, reason = ask(_VERSION.format(module), environ)
    if version is not None:
        return Check(module, State.FINE, str(version))
    if _absent(reason):
        return Check(module, State.BAD if needed else State.NOTE, f"absent{needed}")
    return Check(module, State.BAD, f"cannot be imported: {reason}")


def _mpi(environ: Mapping[str, str]) -> list[Check]:
    python, library = probe.ask_python(sys.executable, environ)
    found = probe.launchers(environ, [python])
    names = (
        ", ".join(f"{one.path} ({one.family.value} {one.major or ''})".replace(" )", ")") for one in found) or "none"
    )
    if library is None:
        _, reason = ask("import json, mpi4py.MPI; print(json.dumps('fine'))", environ)
        words = f"none: {reason}" if reason else "of an unknown family"
        return [Check("MPI library", State.BAD, words), Check("MPI launchers", State.NOTE, names)]
    checks = [Check("MPI library", State.FINE, library.text), Check("MPI launchers", State.FINE, names)]
    try:
        launcher = choose(found, library, python)
    except LaunchError as error:
        return [*checks[:1], Check("MPI launchers", State.BAD, f"{names}. {error}")]
    checks.append(Check("hvdxrun uses", State.FINE, f"{launcher.path}, of the library's family"))
    return [*checks, _start(environ)]


def _start(environ: Mapping[str, str]) -> Check:
    # The one check that nothing else can stand for: two ranks, one world.
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "two_ranks.py"
        program.write_text(_TWO_RANKS)
        line = [sys.executable, "-m", "hvdx.launch.hvdxrun", "-np", "2", sys.executable, str(program)]
        code, output, errors = probe.run(line, environ, _START_LIMIT)
    if code == 0 and output.count("sum 3") == 2:
        return Check("two ranks", State.FINE, "started and added their numbers")
    words = (errors.strip() or output.strip() or f"exit code {code}").splitlines()
    return Check("two ranks", State.BAD, f"did not form one world (exit code {code}): {words[-1]}")


def _horovod(environ: Mapping[str, str]) -> Check:
    answer, reason = ask(_HOROVOD, environ)
    if isinstance(answer, list):
        return Check("horovod", State.FINE, f"{answer[0]}, built with {', '.join(answer[1]) or 'no controller'}")
    if _absent(reason):
        return Check("horovod", State.NOTE, "absent (needed for HVDX_COMM=horovod only)")
    return Check("horovod", State.NOTE, f"cannot be imported, so HVDX_COMM=horovod cannot be used: {reason}")


def _gpus(environ: Mapping[str, str]) -> Check:
    answer, reason = ask(_GPUS, environ)
    if not isinstance(answer, list):
        return Check("GPUs", State.NOTE, f"unknown: {reason}")
    return Check("GPUs", State.FINE if answer else State.NOTE, ", ".join(map(str, answer)) or "none seen by TensorFlow")


def report(environ: Mapping[str, str] | None = None) -> list[Check]:
    """Return all checks, in the order of the report. Takes some seconds: TensorFlow is imported in other processes."""
    environ = os.environ if environ is None else environ
    extra = " (pip install 'hvdx[cpu]', 'hvdx[tensorflow]' or 'hvdx[gpu]')"
    asked: list[Callable[[], Check | list[Check]]] = [
        lambda: _package("hvdx", " here", environ),
        lambda: _package("tensorflow", extra, environ),
        lambda: _package("keras", "", environ),
        lambda: _package("tf_keras", "", environ),
        lambda: _mpi(environ),
        lambda: _horovod(environ),
        lambda: _gpus(environ),
    ]
    with ThreadPoolExecutor(max_workers=max(1, min(4, cores_of_this_host()))) as pool:
        answers = [future.result() for future in [pool.submit(question) for question in asked]]
    checks = [
        Check("python", State.FINE, f"{sys.version.split()[0]}, {sys.executable}"),
        Check("cores", State.FINE, str(cores_of_this_host())),
    ]
    for answer in answers:
        checks += answer if isinstance(answer, list) else [answer]
    return checks
