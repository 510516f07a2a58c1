"""Making the communicator that was asked for, or the one that fits how the process was started."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from hvdx import environment
from hvdx.comm.communicator import Communicator
from hvdx.comm.deadline import start_limit
from hvdx.comm.launchers import by_horovodrun, detect
from hvdx.errors import ConfigurationError, WorldError
from hvdx.logs import log

NAMES = ("single", "shared_memory", "mpi", "horovod", "tensorflow", "servers")


def create(comm: Any = None) -> Communicator:
    """Return a communicator.

    Args:
        comm: a name (see NAMES, or "auto"), an mpi4py communicator, or None for HVDX_COMM.

    Raises:
        ConfigurationError: the name is unknown or the object is no communicator.
        WorldError: the launcher says N > 1 ranks and the communicator has another number.
        MissingDependencyError: what the communicator needs is not installed.
    """
    if isinstance(comm, Communicator):
        return comm
    if comm is not None and not isinstance(comm, str):
        if not hasattr(comm, "Get_rank"):
            raise ConfigurationError(
                f"init(comm=) takes {', '.join(map(repr, NAMES))}, 'auto' or an mpi4py communicator. "
                f"Received: {comm!r}."
            )
        communicator = _make_shared_memory(comm)
        from hvdx.comm.mpi_library import MPI

        check_size(communicator, os.environ, MPI.COMM_WORLD.Get_size())
        return communicator
    asked = comm if comm is not None else environment.COMM.read()
    name = asked.strip().lower()
    if name == "auto":
        name = automatic(os.environ)
    if name not in NAMES:
        raise ConfigurationError(
            f"There is no communicator {asked!r}. Use one of {', '.join(NAMES)} or auto (HVDX_COMM or init(comm=))."
        )
    communicator = _make(name)
    check_size(communicator, os.environ)
    return communicator


def automatic(environ: Mapping[str, str]) -> str:
    """Return the name of the communicator that fits the launcher and the devices."""
    if has_servers(environ):
        return "servers"
    controller = by_horovodrun(environ)
    # over Gloo there is nothing else; over MPI, shared memory does as well where Horovod is missing
    if controller == "gloo" or (controller == "mpi" and importlib.util.find_spec("horovod") is not None):
        return "horovod"
    launcher = detect(environ)
    if launcher is None:
        return "single"
    if _gpus_visible(environ):
        return "horovod" if _horovod_with_nccl() else "tensorflow"
    return "shared_memory"


def has_servers(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher's, hvdx's or BytePS's variables say that this is a job with parameter servers."""
    if environment.ROLE.read(environ) or environment.SERVERS.read(environ) or environment.ROOT.read(environ):
        return True
    return bool(environ.get("DMLC_ROLE")) and environ.get("DMLC_NUM_SERVER", "0") != "0"


def _make(name: str) -> Communicator:
    if name == "servers":
        from hvdx.distribute.server_job import join

        # Met before the communicator is imported: a server ends here.
        job = join()
        from hvdx.comm.servers import ServersCommunicator

        return ServersCommunicator(job)
    if name == "shared_memory":
        return _make_shared_memory()
    if name == "mpi":
        return _make_mpi()
    if name == "horovod":
        from hvdx.comm.horovod import HorovodCommunicator

        return HorovodCommunicator()
    if name == "tensorflow":
        from hvdx.comm.tensorflow import TensorFlowCommunicator

        return TensorFlowCommunicator()
    from hvdx.comm.single import SingleCommunicator

    return SingleCommunicator()


def _make_mpi(comm: Any = None) -> Communicator:
    with start_limit("MPI to start"):
        from hvdx.comm.mpi import MpiCommunicator

        return MpiCommunicator(comm)


def _make_shared_memory(comm: Any = None) -> Communicator:
    """Return a communicator that shares memory where ranks have a host in common, and else that of MPI alone."""
    with start_limit("MPI to start"):
        from hvdx.comm.shared_memory import SharedMemoryCommunicator

        communicator = SharedMemoryCommunicator(comm)
        if communicator.shares:
            return communicator
        if communicator.problem and communicator.topology.rank == 0:
            log.warning("Ranks of a host cannot share memory (%s): all bytes travel by MPI.", communicator.problem)
        communicator.close(clean=True)
    return _make_mpi(comm)


def check_size(communicator: Communicator, environ: Mapping[str, str], size: int | None = None) -> None:
    """Compare the world with what the launcher says: N trainings that each believe to be alone must not start.

    Args:
        communicator: the one that was made.
        environ: the environment with the launcher's marks.
        size: how many processes its library sees, where the communicator may be a part of them.

    Raises:
        WorldError: the launcher started more ranks than the communicator sees.
    """
    launcher = detect(environ)
    size = communicator.topology.size if size is None else size
    if launcher is None or launcher.size == size:
        return
    if communicator.name == "servers":
        return  # its size is that of the job's description, which has been compared; the launcher counts servers too
    facts = (
        f"{launcher.name} started {launcher.size} processes ({launcher.variable}={launcher.size}), "
        f"but the {communicator.name} communicator sees {size}"
    )
    if communicator.name == "single":
        log.warning("%s: this process trains alone, as HVDX_COMM or init(comm=) asked.", facts)
        return
    cause = (
        "In a job with parameter servers the workers meet through them: leave the choice to hvdx (HVDX_COMM=auto)."
        if has_servers(environ)
        else "The usual cause is a launcher of one MPI with the library of another: start the program with the "
        "launcher that belongs to the installed MPI, most simply `hvdxrun`; `hvdx doctor` shows both."
    )
    raise WorldError(f"{facts}. {cause}")


def _gpus_visible(environ: Mapping[str, str]) -> bool:
    if environ.get("CUDA_VISIBLE_DEVICES", "all") in {"", "-1"}:
        return False
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def _horovod_with_nccl() -> bool:
    if importlib.util.find_spec("horovod") is None:
        return False
    try:
        import horovod.tensorflow as horovod
    except ImportError:
        return False
    return bool(horovod.nccl_built())
