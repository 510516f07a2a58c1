"""Every environment variable hvdx reads, in one table: name, Horovod's twin, type, default, meaning.

`hvdx env` prints the table with the values in force. Each value is read when it is asked for, so a program may
set a variable after the import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdx.errors import ConfigurationError


def _to_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off", ""}:
        return False
    raise ValueError("expected 0 or 1")


def _to_bytes(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("expected a number of bytes, 0 or more")
    return value


def _to_count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("expected a whole number, 0 or more")
    return value


def _to_seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("expected a number of seconds above 0")
    return value


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return text.strip().lower()

    return parse


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the Horovod name read as a fallback, and how to read it."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str
    horovod: str | None = None

    def source(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Return the name under which the environment gives the value in force, None where the default is."""
        environ = os.environ if environ is None else environ
        return next((name for name in (self.name, self.horovod) if name is not None and name in environ), None)

    def read(self, environ: Mapping[str, str] | None = None) -> Any:
        """Return the value in force: hvdx's name first, then Horovod's, then the default.

        Raises:
            ConfigurationError: the text is not of the variable's type; names the variable and the text.
        """
        environ = os.environ if environ is None else environ
        name = self.source(environ)
        if name is None:
            return self.default
        try:
            return self.parse(environ[name])
        except ValueError as error:
            raise ConfigurationError(
                f"{name}={environ[name]!r} cannot be used: {error}. It means: {self.meaning}."
            ) from None


def check_threshold(threshold: Any) -> None:
    """Check a fusion threshold given as an argument; None stands for the variable's value.

    Raises:
        ConfigurationError: it is no number of bytes.
    """
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0):
        raise ConfigurationError(f"fusion_threshold is a number of bytes, 0 or more. Received: {threshold!r}.")


COMM = Variable(
    "HVDX_COMM",
    _one_of("auto", "single", "shared_memory", "mpi", "horovod", "tensorflow", "servers"),
    "auto",
    "communicator: auto, single, shared_memory, mpi, horovod, tensorflow, or servers in a job with parameter servers",
)
FUSION_THRESHOLD = Variable(
    "HVDX_FUSION_THRESHOLD", _to_bytes, 128 * 1024 * 1024,
    "largest fusion buffer in bytes; 0 sends every tensor alone", "HOROVOD_FUSION_THRESHOLD",
)  # fmt: skip
ALLREDUCE = Variable(
    "HVDX_ALLREDUCE",
    _one_of("auto", "mpi", "ring", "recursive_doubling", "halving_doubling", "tree", "hierarchical"),
    "auto",
    "how buffers are reduced over MPI, read by init(): auto (by size and topology, as measured), mpi (the library's "
    "own way), ring, recursive_doubling, halving_doubling, tree or hierarchical",
)
OVERLAP = Variable(
    "HVDX_OVERLAP", _one_of("auto", "0", "1"), "auto",
    "whether gradients leave in buckets while others are still computed: 0, 1, or auto, with ranks on several hosts",
)  # fmt: skip
AUTOTUNE = Variable(
    "HVDX_AUTOTUNE", _to_bool, False,
    "whether optimizers search for the fastest buckets and algorithm in their first updates", "HOROVOD_AUTOTUNE",
)  # fmt: skip
TIMEOUT = Variable(
    "HVDX_TIMEOUT", _to_seconds, 600.0, "seconds a rank waits for the others in a collective before it fails"
)
START_TIMEOUT = Variable(
    "HVDX_START_TIMEOUT",
    _to_seconds,
    120.0,
    "seconds init() waits for the other ranks",
    "HOROVOD_START_TIMEOUT",
)
SHUTDOWN_TIMEOUT = Variable(
    "HVDX_SHUTDOWN_TIMEOUT",
    _to_seconds,
    3600.0,
    "seconds a rank that has finished waits for the others at its exit",
)
STALL_WARNING = Variable(
    "HVDX_STALL_WARNING", _to_seconds, 60.0, "seconds of waiting after which a rank says for whom it waits",
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
)  # fmt: skip
LOG = Variable(
    "HVDX_LOG",
    _one_of("trace", "debug", "info", "warning", "error", "fatal"),
    "warning",
    "log level: debug, info, warning or error",
    "HOROVOD_LOG_LEVEL",
)
EXPECTED_SIZE = Variable("HVDX_EXPECTED_SIZE", int, None, "number of ranks the launcher started; set by hvdxrun")
THREADS_PER_RANK = Variable("HVDX_THREADS_PER_RANK", int, None, "threads of TensorFlow's pools; set by hvdxrun")
TF_ADDRESSES = Variable(
    "HVDX_TF_ADDRESSES", str, None, "host:port of every rank, by comma, for the tensorflow communicator"
)
SERVERS = Variable(
    "HVDX_SERVERS",
    _to_count,
    0,
    "number of parameter servers; set by hvdxrun, or by you where srun starts the program",
)
ROLE = Variable(
    "HVDX_ROLE", _one_of("worker", "server"), None, "what this process is, worker or server; set by hvdxrun"
)
INDEX = Variable("HVDX_INDEX", _to_count, None, "this process's number among those of its role; set by hvdxrun")
ROOT = Variable("HVDX_ROOT", str, None, "host:port, by comma, where workers and servers meet; set by hvdxrun")
TOKEN = Variable("HVDX_TOKEN", str, None, "secret by which the members of a job know each other; set by hvdxrun")
SERVER_GRACE = Variable(
    "HVDX_SERVER_GRACE", _to_seconds, 30.0, "seconds a server may run on after the last worker, before hvdxrun ends it"
)

ALL: tuple[Variable, ...] = (
    COMM, FUSION_THRESHOLD, OVERLAP, AUTOTUNE, ALLREDUCE, TIMEOUT, START_TIMEOUT, SHUTDOWN_TIMEOUT, STALL_WARNING, LOG,
    EXPECTED_SIZE, THREADS_PER_RANK, TF_ADDRESSES, SERVERS, ROLE, INDEX, ROOT, TOKEN, SERVER_GRACE,
)  # fmt: skip


def check_all() -> None:
    """Read every variable, so that a value that cannot be used is refused at once and not in the first step.

    Raises:
        ConfigurationError: names the first such variable.
    """
    for variable in ALL:
        variable.read()
