"""Running MPI's launcher: passes on the ranks' output, ends everything on a signal, and says which rank failed first."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, Protocol

from hvdx.launch.lines import LineBuffer, write_all

_FAILURE = re.compile(
    r"\[hvdxrun\] rank (\d+) on (\S+) ((?:exited with code (\d+))|(?:was ended by signal (\d+) \(\w+\)))\s*$"
)
_HOST_NOTE = re.compile(r"\[hvdxrun\] (\S+): (.*)")
_TAGGED = re.compile(r"\[(\d+)\] ?")
_TAIL = 80
_QUIET = 0.3
# After a failure or a signal: MPI's launcher gets this long to end the other ranks, then it is ended itself, and with
# it every rank, since each is tied to its parent.
_PATIENCE = 6.0


class Filter(Protocol):
    """What a way of starting ranks knows about the lines its launcher prints."""

    held: list[str]

    def feed(self, line: str) -> list[str]: ...

    def finish(self) -> list[str]: ...


@dataclass(frozen=True)
class Failure:
    """The first rank that failed."""

    rank: int
    host: str
    words: str
    code: int


def parse_failure(line: str) -> Failure | None:
    """Read the line by which the process beside a rank tells how it ended."""
    match = _FAILURE.match(line)
    if match is None:
        return None
    code = int(match[4]) if match[4] is not None else 128 + int(match[5])
    return Failure(int(match[1]), match[2], match[3], code)


class ErrorLines:
    """What arrives on the launcher's stderr: keeps the first failure, each rank's tail, and drops the banner."""

    def __init__(self, banner: Filter) -> None:
        self.failure: Failure | None = None
        self._banner = banner
        self._tails: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_TAIL))
        self._since: dict[int, int] = defaultdict(int)
        self._notes: set[str] = set()

    def feed(self, line: str) -> list[str]:
        """Take a line; return the lines to show."""
        if failure := parse_failure(line):
            self.failure = self.failure or failure
            return []
        if note := _HOST_NOTE.match(line):
            # The same for every host is said once.
            fresh = note[2] not in self._notes
            self._notes.add(note[2])
            return [line] if fresh else []
        if tagged := _TAGGED.match(line):
            self._note_rank(int(tagged[1]), line)
            return [line]
        return self._banner.feed(line)

    def saw_output(self, rank: int) -> None:
        """Count a line of a rank's stdout, so that a traceback which it pushed up is shown again."""
        for other in self._since:
            if other != rank:
                self._since[other] += 1

    def _note_rank(self, rank: int, line: str) -> None:
        self._tails[rank].append(line)
        self.saw_output(rank)
        self._since[rank] = 0

    def closing(self, np: int, code: int, stopped: bool) -> list[str]:
        """Return the last lines: the launcher's own words where no rank has reported, and the first failure."""
        lines = self._banner.finish()
        failure = self.failure
        if failure is None:
            return lines + (self._banner.held if code != 0 and not stopped else [])
        tail = list(self._tails[failure.rank])
        starts = [number for number, line in enumerate(tail) if "Traceback (most recent call last)" in line]
        if self._since[failure.rank] and starts:
            lines += [f"[hvdxrun] rank {failure.rank} failed first; its traceback again:\n", *tail[starts[-1] :]]
        others = "; the others were ended" if np > 1 else ""
        return [*lines, f"[hvdxrun] rank {failure.rank} on {failure.host} {failure.words}{others}\n"]


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
            self.expect_end(_PATIENCE)
            self._send(signal.SIGTERM)
        else:
            self._deadline = 0.0

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
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def _tie_to_parent() -> None:
    # PR_SET_PDEATHSIG: whoever ends hvdxrun, even by SIGKILL, ends MPI's launcher.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


def run(line: Sequence[str], environ: Mapping[str, str], np: int, banner: Filter) -> int:
    """Run MPI's launcher to its end; return the exit code of the first failure (128 + signal where a signal ended it)."""
    interactive = sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()
    process = subprocess.Popen(
        list(line), env=dict(environ), stdin=subprocess.DEVNULL if interactive else None, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True, preexec_fn=_tie_to_parent, bufsize=0,
    )  # fmt: skip
    stopper = _Stopper(process)
    previous = {
        number: signal.signal(number, stopper.handle)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    errors = ErrorLines(banner)
    try:
        _pump(process, errors, stopper)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
    code = 128 - code if code < 0 else code
    stopped = stopper.received is not None
    if not stopped or errors.failure is not None:
        write_all(2, "".join(errors.closing(np, code, stopped)).encode())
    if errors.failure is not None:
        return errors.failure.code
    return code if stopper.received is None else 128 + stopper.received


def _pump(process: subprocess.Popen[bytes], errors: ErrorLines, stopper: _Stopper) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    buffers: dict[IO[bytes], LineBuffer] = {process.stdout: LineBuffer(), process.stderr: LineBuffer()}

    def show(stream: IO[bytes], data: bytes) -> None:
        if stream is process.stderr:
            text = data.decode(errors="surrogateescape")
            shown = [out for line in text.splitlines(keepends=True) for out in errors.feed(line)]
            write_all(2, "".join(shown).encode(errors="surrogateescape"))
        else:
            for rank in {int(match) for match in re.findall(rb"^\[(\d+)\] ", data, re.MULTILINE)}:
                errors.saw_output(rank)
            write_all(1, data)

    with selectors.DefaultSelector() as selector:
        for stream in buffers:
            selector.register(stream, selectors.EVENT_READ)
        ended_by: float | None = None
        while selector.get_map():
            ready = selector.select(_QUIET)
            for key, _ in ready:
                stream = key.fileobj  # type: ignore[assignment]
                data = os.read(key.fd, 65536)
                show(stream, buffers[stream].feed(data))
                if not data:
                    selector.unregister(stream)
            if not ready:
                show(process.stdout, buffers[process.stdout].flush())
            if errors.failure is not None:
                stopper.expect_end(_PATIENCE)
            stopper.check()
            if process.poll() is not None:
                # A process that outlives the launcher may hold the pipes open.
                ended_by = ended_by or time.monotonic() + 2.0
                if time.monotonic() > ended_by:
                    break
    for stream, buffer in buffers.items():
        show(stream, buffer.flush(end_line=True))
        stream.close()
