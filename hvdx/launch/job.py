"""Running MPI's launcher: passes on output, ends everything on a signal, says which rank failed first."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

from hvdx.launch import leftovers
from hvdx.launch.lines import LineBuffer, write_all
from hvdx.launch.report import Filter, Report
from hvdx.launch.servers import Servers

_QUIET = 0.3
_DRAIN = 2.0
# After a signal or a failure MPI's launcher gets this long to end the (other) ranks, then it is ended itself, and with
# it every rank, since each is tied to its parent. Hydra does not end by itself when a rank on another host has died.
_PATIENCE = 6.0
_PATIENCE_AFTER_FAILURE = 2.0


class _Stopper:
    """Turns signals into the end of MPI's launcher: first asked, then forced."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.received: int | None = None
        self._process = process
        self._deadline: float | None = None
        self._kills = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            name = signal.Signals(number).name
            write_all(2, f"[hvdxrun] got {name}: ending all ranks\n".encode())
            self.end()
        else:
            self._deadline = 0.0

    def end(self) -> None:
        """Ask for the end of what is left."""
        self.expect_end(_PATIENCE)
        self._send(signal.SIGTERM)

    def expect_end(self, seconds: float) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds

    def check(self) -> None:
        """Force the end when the time is over: by SIGTERM once more, then by SIGKILL."""
        if self._deadline is None or time.monotonic() < self._deadline:
            return
        self._send(signal.SIGKILL if self._kills or self.received is not None else signal.SIGTERM)
        self._kills += 1
        self._deadline = time.monotonic() + _PATIENCE / 2

    def _send(self, number: int) -> None:
        # Intel MPI's mpirun is a script, which keeps a signal to itself: the group has the launcher proper as well.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _tie_to_parent() -> None:
    # PR_SET_PDEATHSIG: whoever ends hvdxrun, even by SIGKILL, ends MPI's launcher.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


def run(
    line: Sequence[str], environ: Mapping[str, str], np: int, banner: Filter, servers: Servers | None = None
) -> int:
    """Run MPI's launcher to its end; return the exit code of the first failure (128 + number for a signal)."""
    began = time.time()
    process = subprocess.Popen(
        list(line), env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True, preexec_fn=_tie_to_parent, bufsize=0,
    )  # fmt: skip
    stopper = _Stopper(process)
    previous = {
        number: signal.signal(number, stopper.handle)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    report = Report(banner, servers)
    try:
        _pump(process, report, stopper, servers)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
    code = 128 - code if code < 0 else code
    if servers is not None:
        code = servers.code(code)
    if code != 0 or report.failure is not None or stopper.received is not None:
        leftovers.sweep(began)
    _write(2, report.closing(np, quiet=code == 0 or stopper.received is not None))
    if report.failure is not None:
        return report.failure.code
    return code if stopper.received is None else 128 + stopper.received


class _Output:
    """One output of MPI's launcher, shown line by line as the report says."""

    def __init__(self, source: IO[bytes], target: int, report: Report) -> None:
        self.source = source
        self._target = target
        self._report = report
        self._buffer = LineBuffer()
        self._inside_line = False

    def pump(self) -> bool:
        data = os.read(self.source.fileno(), 65536)
        self._show(self._buffer.feed(data))
        return bool(data)

    def flush(self, end_line: bool = False) -> None:
        self._show(self._buffer.flush(end_line))

    def _show(self, data: bytes) -> None:
        shown: list[str] = []
        for line in data.splitlines(keepends=True):
            text = line.decode(errors="surrogateescape")
            # The rest of a line whose beginning is already shown has no tag of its own.
            shown += [text] if self._inside_line else self._report.feed(text, errors=self._target == 2)
            self._inside_line = not line.endswith((b"\n", b"\r"))
        _write(self._target, shown)


def _write(target: int, lines: Sequence[str]) -> None:
    write_all(target, "".join(lines).encode(errors="surrogateescape"))


def _pump(process: subprocess.Popen[bytes], report: Report, stopper: _Stopper, servers: Servers | None) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = (_Output(process.stdout, 1, report), _Output(process.stderr, 2, report))
    ended_by: float | None = None
    with selectors.DefaultSelector() as selector:
        for output in outputs:
            selector.register(output.source, selectors.EVENT_READ, output)
        while selector.get_map():
            ready = selector.select(_QUIET)
            for key, _ in ready:
                if not key.data.pump():
                    selector.unregister(key.fileobj)
            if not ready:
                for output in outputs:
                    output.flush()
            if report.failure is not None:
                stopper.expect_end(_PATIENCE_AFTER_FAILURE)
            elif servers is not None and (sentence := servers.overdue()):
                _write(2, [sentence])
                stopper.end()
            stopper.check()
            if process.poll() is not None:
                # A process that outlives the launcher may hold the pipes open.
                ended_by = ended_by or time.monotonic() + _DRAIN
                if time.monotonic() > ended_by:
                    break
    for output in outputs:
        output.flush(end_line=True)
        output.source.close()
