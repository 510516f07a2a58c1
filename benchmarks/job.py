"""A running job: its ranks are started once and answer one message at a time; every wait has a limit."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.catalogue import Kind
from benchmarks.gate import Gate
from benchmarks.guardian import guard
from benchmarks.launching import Command

START_SECONDS = 180.0
ANSWER_SECONDS = 240.0
END_SECONDS = 20.0
_CHATTER = re.compile(r"oneDNN custom operations|before absl::InitializeLog")
"""What TensorFlow prints at every start, whatever its log level."""
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


class JobError(RuntimeError):
    """A job cannot go on; says why, with the last lines that its ranks printed."""


@dataclass
class _Rank:
    pid: int
    connection: socket.socket
    lines: IO[str]


class Job:
    """The ranks of one peer.

    Args:
        kind: which peer.
        ranks: how many.
        folder: an empty folder for the socket, the gate and what the ranks print.
    """

    def __init__(self, kind: Kind, ranks: int, folder: Path) -> None:
        self.kind = kind
        self.ranks = ranks
        self.versions: dict[str, str] = {}
        self._log = folder / "output"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[_Rank] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen(ranks)
        self._listener.settimeout(0.5)
        Gate.make(folder / "gate", ranks)

    def start(self, commands: Sequence[Command]) -> None:
        """Start the ranks and wait until they have joined each other.

        Raises:
            JobError: they have not.
        """
        with self._log.open("ab") as log:
            for command in commands:
                self._processes.append(
                    subprocess.Popen(
                        command.line, env=command.environ, cwd=self._log.parent, stdin=subprocess.DEVNULL,
                        stdout=log, stderr=log, start_new_session=True, preexec_fn=_tie_to_parent,
                    )
                )  # fmt: skip
        end = time.monotonic() + START_SECONDS
        found: dict[int, _Rank] = {}
        while len(found) < self.ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._still_there(end)
                continue
            connection.settimeout(ANSWER_SECONDS)
            lines = connection.makefile("r", encoding="utf-8")
            hello = json.loads(lines.readline())
            if hello["size"] != self.ranks:
                raise self._error(f"a rank sees {hello['size']} rank(s) where {self.ranks} were started")
            found[hello["rank"]] = _Rank(hello["pid"], connection, lines)
            guard(hello["pid"])
            self.versions |= hello["versions"]
        self._ranks = [found[rank] for rank in range(self.ranks)]
        self.pause()

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Have all ranks do something; returns their answers in the order of ranks.

        Raises:
            JobError: one of them could not, or did not answer.
        """
        self.resume()
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        answers = []
        try:
            for rank in self._ranks:
                rank.connection.sendall(line)
            for number, rank in enumerate(self._ranks):
                text = rank.lines.readline()
                if not text:
                    raise self._error(f"rank {number} ended while it was to {do}")
                answers.append(json.loads(text))
        except OSError as error:
            raise self._error(f"no answer to {do!r}: {error}") from None
        for number, answer in enumerate(answers):
            if "error" in answer:
                raise self._error(f"rank {number} could not {do}: {answer['error'].strip()}")
        self.pause()
        return answers

    def pause(self) -> None:
        """Stop the ranks where their threads would keep cores busy while others are measured."""
        if self.kind.stops:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the ranks go on."""
        if self.kind.stops:
            self._signal(signal.SIGCONT)

    def dismiss(self) -> None:
        """Tell the ranks to leave, without waiting for it."""
        self.resume()
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.sendall(b'{"do": "end"}\n')

    def end(self) -> None:
        """End the ranks, in peace if they can; afterwards none of them is left."""
        self.dismiss()
        everybody = len(self._ranks) == self.ranks
        limit = time.monotonic() + (END_SECONDS if everybody else 0)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self._signal_processes(number)
                limit = time.monotonic() + END_SECONDS / 2
            if self._gone(limit):
                break
        self._signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.lines.close()
            rank.connection.close()
        self._listener.close()

    def said(self, lines: int = 15) -> str:
        """Return the last lines that the ranks and their launcher printed."""
        told = [line for line in self._log.read_text(errors="replace").splitlines() if not _CHATTER.search(line)]
        return "\n".join(told[-lines:])

    def _gone(self, limit: float) -> bool:
        while any(process.poll() is None for process in self._processes):
            if time.monotonic() > limit:
                return False
            time.sleep(0.05)
        return True

    def _still_there(self, end: float) -> None:
        codes = [process.poll() for process in self._processes]
        if any(code is not None for code in codes):
            raise self._error(f"it ended at its start (exit codes {codes})")
        if time.monotonic() > end:
            raise self._error(f"its ranks did not all join within {START_SECONDS:g} s")

    def _error(self, what: str) -> JobError:
        return JobError(f"{self.kind.name}: {what}\n{self.said()}".rstrip())

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            # The id is the rank's as long as its end of the socket is open; a dead rank's may be somebody else's.
            if _alive(rank.connection):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def _signal_processes(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


def _alive(connection: socket.socket) -> bool:
    """Return whether the other end is open; reads nothing."""
    try:
        # A socket with a time limit would wait for it, whatever the flags say.
        readable, _, _ = select.select([connection], [], [], 0)
        return not readable or connection.recv(1, socket.MSG_PEEK) != b""
    except OSError:
        return False


def _tie_to_parent() -> None:
    """End with the driver, however that ends: launchers get a signal to end their ranks, which are never orphans."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
