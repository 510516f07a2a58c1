"""Who am I, who are the others: `init`, `shutdown`, `rank`, `size` and their kin, and how a process leaves the world.

A rank that ends well says goodbye and waits for the others' goodbye, so that a rank which leaves early is noticed by
those that still work. A rank that fails leaves at once, without waiting for anybody; the launcher then ends the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from hvdx import environment, logs
from hvdx.comm.communicator import Communicator
from hvdx.errors import HvdxError, NotInitializedError

_communicator: Communicator | None = None
_failed = False
_together = True  # whether every world that this process has left was left by all its ranks
_hooks_installed = False
_lock = threading.Lock()
_process = 0  # the one that joined; a child that it forks is no rank


def init(comm: Any = None) -> None:
    """Join the world; collective: every rank must call it. A second call does nothing.

    In a job with parameter servers the workers are the ranks, and on a server this does not return: it serves until all
    workers have finished, and the process ends.

    Args:
        comm: "auto" (default, or what HVDX_COMM says), "single", "shared_memory", "mpi", "horovod", "tensorflow" or
            "servers"; or an mpi4py communicator, whose ranks then form the world.

    Raises:
        ConfigurationError: `comm` is none of these.
        WorldError: the launcher started several ranks and this process cannot see the others.
        StallError: a rank did not come within HVDX_START_TIMEOUT seconds.
    """
    global _communicator, _process
    with _lock:
        if _communicator is not None:
            return
        from hvdx.comm import choose

        logs.configure(0)
        environment.check_all()
        communicator = choose.create(comm)
        logs.configure(communicator.topology.rank)
        _communicator = communicator
        _process = os.getpid()
        _install_hooks()
        logs.log.info("communicator %s, %s", communicator.name, communicator.topology)


def shutdown() -> None:
    """Leave the world; collective. `init` may be called again afterwards, except that MPI stays loaded."""
    global _communicator, _together
    with _lock:
        communicator, _communicator = _communicator, None
    if communicator is not None:
        _together = communicator.close(clean=True) and _together


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` not since."""
    return _communicator is not None


def communicator() -> Communicator:
    """Return the communicator of this world.

    Raises:
        NotInitializedError: `init` has not been called.
    """
    if _communicator is None:
        raise NotInitializedError("hvdx has not been initialized. Call hvd.init() once, before anything else of hvdx.")
    return _communicator


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Let the others take longer than HVDX_TIMEOUT to come to the collectives inside: up to `seconds`."""
    agreement = getattr(communicator(), "_agreement", None)
    if agreement is None:
        yield
        return
    before, agreement.patience = agreement.patience, seconds
    try:
        yield
    finally:
        agreement.patience = before


def say_failed(cause: str) -> None:
    """Tell the other ranks, whatever they wait for, why this one cannot come; they raise MismatchError with it."""
    agreement = getattr(_communicator, "_agreement", None)
    if agreement is not None:
        agreement.say_failed(cause)


def last_error() -> HvdxError | None:
    """Return the error that ended this world's collectives, or None; TensorFlow hides its type when it is in a step."""
    return getattr(getattr(_communicator, "_agreement", None), "error", None)


def rank() -> int:
    """Return this process's number in the world, from 0 to size() - 1."""
    return communicator().topology.rank


def size() -> int:
    """Return the number of processes in the world."""
    return communicator().topology.size


def local_rank() -> int:
    """Return this process's number among the ranks of its host; the usual index of its GPU."""
    return communicator().topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return communicator().topology.local_size


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a rank with this local rank."""
    return communicator().topology.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return communicator().topology.cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks; collective."""
    sizes = communicator().allgather_bytes(str(local_size()).encode(), "number of ranks per host")
    return len(set(sizes)) == 1


def _install_hooks() -> None:
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    previous = sys.excepthook

    def on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        _failed = True
        previous(kind, error, trace)
        _repeat_cause(error)

    sys.excepthook = on_uncaught
    atexit.register(_leave)


def _repeat_cause(error: BaseException) -> None:
    """TensorFlow wraps an error raised inside a step in one of its own; say hvdx's once more, as the last lines."""
    cause = last_error()
    if cause and not isinstance(error, HvdxError) and str(cause).splitlines()[0] in str(error):
        print(f"{type(cause).__module__}.{type(cause).__name__}: {cause}", file=sys.stderr, flush=True)


def _leave() -> None:
    """At exit: go together with the others, or, after a failure, without waiting for them."""
    global _communicator
    if os.getpid() != _process:
        return
    current, _communicator = _communicator, None
    together = (current is None or current.close(clean=not _failed)) and _together
    if "hvdx.comm.mpi_library" in sys.modules:
        from hvdx.comm import mpi_library

        if together:
            mpi_library.finalize()
        else:
            mpi_library.abort()
