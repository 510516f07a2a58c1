"""What stands beside every rank: starts the command, tags its lines, divides the cores, tells how it ended.

Started by hvdxrun through MPI's launcher as `python -E -s -S .../rank.py [options] -- command...`, by its path and with
the standard library only, so that it costs a rank some 20 ms and needs nothing imported. Working beside the rank makes
it independent of the MPI: tags, files and exit codes are the same under Open MPI, MPICH and Intel MPI.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING or __package__:
    from hvdx.launch.lines import LineBuffer, atomic_pieces, write_all
    from hvdx.launch.threads import cores_of_this_host, describe, divide
else:
    from lines import LineBuffer, atomic_pieces, write_all
    from threads import cores_of_this_host, describe, divide

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# MPI's launchers follow their SIGTERM with SIGKILL after a second or more; this is for those that do not.
_GRACE = 3.0
# An unfinished line (a prompt, dots) is shown after this time without output.
_QUIET = 0.3
# Grandchildren may hold the pipes open after the rank has ended; its own tail is read long before this.
_DRAIN = 1.0
_PR_SET_PDEATHSIG = 1
# In a job with servers the programs are no MPI ranks: what MPI's launcher left must not make them believe so.
_MPI_MARKS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "HYDI_", "HYDRA_")
# How an MPI is to be used, not that there is one.
_NO_MARKS = ("OMPI_MCA_btl", "OMPI_MCA_osc")

_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


class _Stream:
    """One output of the rank: read from `source`, tagged to `target`, and as it is to `file`."""

    def __init__(self, source: int, target: int, tag: bytes, path: Path | None) -> None:
        self.source = source
        self._target = target
        self._buffer = LineBuffer(tag)
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def pump(self) -> bool:
        """Pass on what there is; False at the end of the stream."""
        try:
            data = os.read(self.source, 65536)
        except OSError:
            return False
        if self._file is not None:
            write_all(self._file, data)
        self._write(self._buffer.feed(data))
        return bool(data)

    def flush(self, end_line: bool = False) -> None:
        self._write(self._buffer.flush(end_line))

    def _write(self, data: bytes) -> None:
        # Whole lines that go into the pipe at once also come out of it at once, so MPI's launcher cannot mix the
        # lines of two ranks.
        for piece in atomic_pieces(data):
            write_all(self._target, piece)


class Child:
    """The rank's own process: started, signalled and waited for."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], outputs: tuple[int, int]) -> None:
        self.code: int | None = None
        self.asked_to_end: float | None = None
        libc = ctypes.CDLL(None, use_errno=True)
        parent = os.getpid()
        # Whoever ends this process ends the rank; whoever ends MPI's launcher ends this process.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become(command, environ, outputs, libc, parent)
            finally:
                os._exit(127)
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)
        # PMI_FD stays open here too: hydra kills everything at once when it closes, and the rank's last lines
        # are still on their way then.

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        if number in _ENDING and self.asked_to_end is None:
            self.asked_to_end = time.monotonic()
        with contextlib.suppress(OSError):
            os.killpg(self.pid, number)

    def poll(self) -> bool:
        """Return whether the process has ended; ends it when it was asked to long ago."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif self.asked_to_end is not None and time.monotonic() - self.asked_to_end > _GRACE:
                self.signal(signal.SIGKILL)
        return self.code is not None


def _become(
    command: Sequence[str], environ: Mapping[str, str], outputs: tuple[int, int], libc: ctypes.CDLL, parent: int
) -> NoReturn:
    os.setpgid(0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)
    # Open MPI 5 never closes a rank's input (seen with 5.0.11: `mpirun cat` hangs), so ranks have none.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(outputs[0], 1)
    os.dup2(outputs[1], 2)
    signal.set_wakeup_fd(-1)
    for number in (*_FORWARDED, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environ))
    except OSError as error:
        os.write(2, f"hvdxrun: cannot start {command[0]!r}: {error.strerror}\n".encode())
        os._exit(126 if isinstance(error, PermissionError) else 127)


def supervise(child: Child, streams: Sequence[_Stream], wakeup: int) -> None:
    """Pass on output and signals until the rank has ended and its output is read."""
    drained_by: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(wakeup, selectors.EVENT_READ, None)
        for stream in streams:
            selector.register(stream.source, selectors.EVENT_READ, stream)
        while True:
            ready = selector.select(_QUIET)
            for key, _ in ready:
                if key.data is None:
                    for number in os.read(wakeup, 4096):
                        if number != signal.SIGCHLD:
                            child.signal(number)
                elif not key.data.pump():
                    selector.unregister(key.fileobj)
            if not ready:
                for stream in streams:
                    stream.flush()
            if child.poll():
                drained_by = drained_by or time.monotonic() + _DRAIN
                if len(selector.get_map()) == 1 or time.monotonic() > drained_by:
                    break
    for stream in streams:
        stream.flush(end_line=True)


def ending(code: int) -> tuple[int, str]:
    """Return the exit code a shell would give, and the words for it."""
    if code >= 0:
        return code, f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return 128 - code, f"was ended by signal {-code} ({name})"


def _first(environ: Mapping[str, str], names: Sequence[str], default: int) -> int:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), default)


def member_of(rank: int, servers: Sequence[int]) -> tuple[str, int]:
    """Return what a process is by its MPI rank: a rank, or in a job with servers a worker or a server."""
    if not servers:
        return "rank", rank
    before = sum(server < rank for server in servers)
    return ("server", before) if rank in servers else ("worker", rank - before)


def without_mpi(environ: Mapping[str, str], role: str, index: int) -> dict[str, str]:
    """Return the environment of a worker or server: its place by hvdxrun, and no mark of MPI's launcher."""
    kept = {
        name: value for name, value in environ.items() if name in _NO_MARKS or not name.startswith(_MPI_MARKS)
    }  # fmt: skip
    return {**kept, "HVDX_ROLE": role, "HVDX_INDEX": str(index)}


def rank_environment(
    environ: Mapping[str, str], threads: int | None, servers: bool = False
) -> tuple[dict[str, str], str]:
    """Return the rank's environment with its threads, and the sentence about them."""
    cores = cores_of_this_host()
    local_size = _first(environ, _LOCAL_SIZE, 1)
    plan = divide(cores, local_size, environ, threads)
    result = {**environ, **plan.assign}
    # The output goes through a pipe, which Python would fill before it shows a line, and lose on a hard exit.
    result.setdefault("PYTHONUNBUFFERED", "1")
    if local_size > cores:
        # More ranks than cores: one that waits must let the others run (measured 2x on a small all-reduce).
        result.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    return result, describe(plan, cores, local_size, servers)


def run(command: Sequence[str], environ: Mapping[str, str], name: str, folder: Path | None) -> Child:
    """Run the command to its end, its lines tagged with the name; return the process as it ended."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (*_FORWARDED, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    tag = f"[{name}] ".encode()
    streams = (
        _Stream(out_read, 1, tag, folder and folder / "stdout"),
        _Stream(err_read, 2, tag, folder and folder / "stderr"),
    )
    child = Child(command, environ, (out_write, err_write))
    os.close(out_write)
    os.close(err_write)
    supervise(child, streams, wake_read)
    if child.code != 0:
        child.signal(signal.SIGKILL)  # what the rank had started itself
    return child


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank's command; return its exit code (128 + signal for one that a signal ended)."""
    parser = argparse.ArgumentParser(prog="rank.py", allow_abbrev=False)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output-filename")
    parser.add_argument("--servers", type=lambda text: [int(rank) for rank in text.split(",")], default=[])
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    rank = _first(os.environ, _RANK, 0)
    host = socket.gethostname()
    role, index = member_of(rank, args.servers)
    environ, sentence = rank_environment(os.environ, args.threads, bool(args.servers))
    if args.servers:
        environ = without_mpi(environ, role, index)
    if _first(os.environ, _LOCAL_RANK, 0) == 0:
        write_all(2, f"[hvdxrun] {host}: {sentence}\n".encode())

    server = role == "server"
    folder = None
    if args.output_filename is not None:
        folder = Path(args.output_filename) / (f"server.{index}" if server else f"rank.{index}")
    child = run(command, environ, f"server {index}" if server else str(index), folder)
    code, words = ending(child.code if child.code is not None else 1)
    # Where there are servers, hvdxrun and its scheduler want to know of every end.
    if (code != 0 or args.servers) and child.asked_to_end is None:
        write_all(2, f"[hvdxrun] {role} {index} on {host} {words}\n".encode())
    # MPI's launcher ends everything when a process fails; the others are to go on without this worker.
    return 0 if args.go_on and role == "worker" else code


if __name__ == "__main__":
    sys.exit(main())
