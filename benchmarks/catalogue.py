"""Which peers there are, where each one lives, and what is missing for those that cannot run here."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path

PROBE_SECONDS = 60
FITS = "fit"
"""The module of the peers that train."""


class Launcher(Enum):
    """What starts the ranks of a job."""

    HVDXRUN = "hvdxrun"
    HOROVODRUN = "horovodrun --gloo"
    PLAIN = "the driver itself, with the variables that the library reads"


@dataclass(frozen=True)
class Kind:
    """A job: a group of ranks with one library that moves bytes.

    Args:
        name: how it is named in tables and options; its ways are named so too, or after what they do.
        peer, argument: the module of benchmarks.peers and what its start() gets.
        launcher: what starts the ranks.
        home: the environment: "main" (the driver's own), "mpich", "intel" (mpich's, with Intel's library) or "torch".
        needs: modules that must be there.
        stops: its threads keep cores busy between turns, so it is stopped there.
        extra: runs only when asked for, or with --full.
        alone: one process, whatever the number of ranks.
        keeps: whether its libraries keep memory of the workloads they have seen.
        environ: variables of its ranks.
    """

    name: str
    peer: str
    argument: str = ""
    launcher: Launcher = Launcher.HVDXRUN
    home: str = "main"
    needs: tuple[str, ...] = ("mpi4py", "tensorflow")
    stops: bool = False
    extra: bool = False
    alone: bool = False
    keeps: bool = True
    environ: dict[str, str] = field(default_factory=dict, hash=False)


_HOROVOD = ("mpi4py", "tensorflow", "horovod")
_LEGACY = {"TF_USE_LEGACY_KERAS": "1"}
_CURRENT = {"TF_USE_LEGACY_KERAS": "0", "KERAS_BACKEND": "tensorflow"}

REDUCTIONS = (
    Kind("yardsticks", "yardsticks", keeps=False),
    Kind("hvdx shared_memory", "hvdx", "shared_memory", needs=("mpi4py", "tensorflow", "hvdx.comm.shared_memory")),
    Kind("hvdx mpi", "hvdx", "mpi"),
    Kind("hvdx tensorflow", "hvdx", "tensorflow"),
    Kind("hvdx horovod", "hvdx", "horovod", needs=_HOROVOD, stops=True),
    Kind("Horovod Open MPI", "horovod", "Open MPI", needs=_HOROVOD, stops=True),
    Kind("Horovod MPICH", "horovod", "MPICH", home="mpich", needs=_HOROVOD, stops=True),
    Kind("Horovod Intel MPI", "horovod", "Intel MPI", home="intel", needs=_HOROVOD, stops=True),
    Kind("Horovod Gloo", "horovod", "Gloo", Launcher.HOROVODRUN, needs=("tensorflow", "horovod"), stops=True),
    Kind("TensorFlow RING", "tensorflow_ring", launcher=Launcher.PLAIN, needs=("tensorflow",)),
    Kind(
        "PyTorch DDP gloo", "torch_gloo", launcher=Launcher.PLAIN, home="torch", needs=("torch", "numpy"), keeps=False
    ),
    Kind("raw MPI, MPICH", "yardsticks", "MPICH", home="mpich", extra=True, keeps=False),
    Kind("raw MPI, Intel MPI", "yardsticks", "Intel MPI", home="intel", extra=True, keeps=False),
)
"""Jobs that reduce tensors."""

TRAININGS = (
    Kind("fit: hvdx, Keras 3", FITS, "hvdx keras", environ=_CURRENT),
    Kind("fit: hvdx, tf_keras", FITS, "hvdx tf_keras", needs=("mpi4py", "tf_keras"), environ=_LEGACY),
    Kind(
        "fit: Horovod, tf_keras", FITS, "horovod tf_keras", needs=(*_HOROVOD, "tf_keras"), stops=True, environ=_LEGACY
    ),
    Kind(
        "fit: MultiWorkerMirrored, tf_keras", FITS, "stock tf_keras", Launcher.PLAIN, needs=("tf_keras",),
        environ=_LEGACY,
    ),
    Kind("fit: no exchange, Keras 3", FITS, "none keras", environ=_CURRENT),
    Kind("fit: no exchange, tf_keras", FITS, "none tf_keras", needs=("mpi4py", "tf_keras"), environ=_LEGACY),
    Kind("fit: one process, Keras 3", FITS, "none keras", alone=True, environ=_CURRENT),
    Kind("fit: one process, tf_keras", FITS, "none tf_keras", needs=("tf_keras",), alone=True, environ=_LEGACY),
)  # fmt: skip
"""Jobs that train the small CNN by `fit`."""


@dataclass(frozen=True)
class Homes:
    """The environments.

    Args:
        main, mpich, torch: the Pythons.
        intel: the folder below which Intel MPI's wheel is installed (lib/libmpi.so.12, bin/mpirun).
    """

    main: Path
    mpich: Path
    intel: Path
    torch: Path

    def python(self, kind: Kind) -> Path:
        """Return the Python of a job."""
        return {"main": self.main, "mpich": self.mpich, "intel": self.mpich, "torch": self.torch}[kind.home]

    def missing(self, kind: Kind) -> str | None:
        """Return the sentence that says why a job cannot run here and what would change that; None if it can."""
        python = self.python(kind)
        if not python.exists():
            return f"there is no {python}; {_remedy(kind)}"
        if kind.home == "intel" and not (self.intel / "lib" / "libmpi.so.12").exists():
            return f"Intel MPI's wheel is not below {self.intel}; {_remedy(kind)}"
        absent = [name for name in kind.needs if name not in _importable(python, kind.needs)]
        if absent:
            return f"{python} has no {', '.join(absent)}; {_remedy(kind, *absent)}"
        return None


def _remedy(kind: Kind, *absent: str) -> str:
    if kind.home != "main":
        return f"`make bench-{kind.home}` installs what it needs"
    if "horovod" in absent:
        return "`make horovod` builds it"
    if any(name.startswith("hvdx.") for name in absent):
        return "this version of hvdx has none yet"
    return "`make envs` installs it"


@cache
def _importable(python: Path, names: tuple[str, ...]) -> frozenset[str]:
    """Return which modules an environment has, without importing any that stands in no package."""
    code = "import importlib.util, sys\nfor n in sys.argv[1:]:\n  print(n if importlib.util.find_spec(n) else '')"
    done = subprocess.run(
        [python, "-c", code, *names],
        cwd=Path(__file__).resolve().parent.parent, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False,
    )  # fmt: skip
    return frozenset(done.stdout.split())
