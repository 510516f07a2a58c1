"""Which rank, worker or server failed first, and what of all the lines is worth showing; no I/O."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Protocol

_ENDING = re.compile(
    r"\[hvdxrun\] (rank|worker|server) (\d+) on (\S+) "
    r"((?:exited with code (\d+))|(?:was ended by signal (\d+) \(\w+\)))\s*$"
)
_HOST_NOTE = re.compile(r"\[hvdxrun\] (\S+): (.*)")
_TAGGED = re.compile(r"\[((?:server )?\d+)\] ?")
_TAIL = 80


class Filter(Protocol):
    """What a way of starting ranks knows about the lines its launcher prints.

    `held` are lines worth showing only where no rank told how it ended; `followers` are ranks whose MPI gave up,
    which it also does when a peer has gone.
    """

    held: list[str]
    followers: set[int]

    def feed(self, line: str) -> list[str]: ...

    def finish(self) -> list[str]: ...


@dataclass(frozen=True)
class Ending:
    """How the program of a rank, a worker or a server has ended."""

    role: str
    index: int
    host: str
    words: str
    code: int

    @property
    def tag(self) -> str:
        """What its lines have in front, between brackets."""
        return f"server {self.index}" if self.role == "server" else str(self.index)

    def __str__(self) -> str:
        return f"{self.role} {self.index} on {self.host} {self.words}"


def parse_ending(line: str) -> Ending | None:
    """Read the line by which the process beside a rank tells how it ended."""
    match = _ENDING.search(line)
    if match is None:
        return None
    code = int(match[5]) if match[5] is not None else 128 + int(match[6])
    return Ending(match[1], int(match[2]), match[3], match[4], code)


class Watcher(Protocol):
    """What in a job with servers becomes of an ending: the lines to show, and whether it ends the job."""

    def ended(self, ending: Ending) -> tuple[list[str], bool]: ...

    def closing(self) -> list[str]: ...


class Report:
    """Reads every line that arrives: keeps the first failure and each rank's last errors, drops the banner."""

    def __init__(self, banner: Filter, watcher: Watcher | None = None) -> None:
        self._failures: list[Ending] = []
        self._banner = banner
        self._watcher = watcher
        self._tails: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_TAIL))
        self._since: dict[str, int] = defaultdict(int)
        self._notes: set[str] = set()

    @property
    def failure(self) -> Ending | None:
        """The first rank that failed by itself; else the first whose MPI gave up."""
        causes = [failure for failure in self._failures if not self._follows(failure)]
        return next(iter(causes or self._failures), None)

    def feed(self, line: str, errors: bool) -> list[str]:
        """Take a line of stdout or (with `errors`) stderr; return the lines to show."""
        if tagged := _TAGGED.match(line):
            self._note_rank(tagged[1], line if errors else None)
            return [line]
        if ending := parse_ending(line):
            shown, fatal = ([], True) if self._watcher is None else self._watcher.ended(ending)
            if fatal:
                self._failures.append(ending)
            return shown
        if note := _HOST_NOTE.match(line):
            # The same for every host is said once.
            fresh = note[2] not in self._notes
            self._notes.add(note[2])
            return [line] if fresh else []
        return self._banner.feed(line)

    def _follows(self, failure: Ending) -> bool:
        return failure.role == "rank" and failure.index in self._banner.followers

    def _note_rank(self, tag: str, error_line: str | None) -> None:
        for other in self._since:
            if other != tag:
                self._since[other] += 1
        if error_line is not None:
            self._tails[tag].append(error_line)
            self._since[tag] = 0

    def closing(self, np: int, quiet: bool) -> list[str]:
        """Return the last lines: the first failure; where no rank told one, and not `quiet`, the launcher's words."""
        lines = self._banner.finish()
        lost = [] if self._watcher is None else self._watcher.closing()
        failure = self.failure
        if failure is None:
            return [*lines, *lost] if quiet else [*lines, *self._banner.held, *lost]
        tail = list(self._tails[failure.tag])
        starts = [number for number, line in enumerate(tail) if "Traceback (most recent call last)" in line]
        if self._since[failure.tag] and starts:
            again = f"[hvdxrun] {failure.role} {failure.index} failed first; its traceback again:\n"
            lines += [again, *tail[starts[-1] :]]
        if self._follows(failure):
            lines += self._banner.held
        others = "; the others were ended" if np > 1 else ""
        return [*lines, *lost, f"[hvdxrun] {failure}{others}\n"]
