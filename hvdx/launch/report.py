"""Which rank failed first, and what of all the lines is worth showing; no I/O."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Protocol

_FAILURE = re.compile(
    r"\[hvdxrun\] rank (\d+) on (\S+) ((?:exited with code (\d+))|(?:was ended by signal (\d+) \(\w+\)))\s*$"
)
_HOST_NOTE = re.compile(r"\[hvdxrun\] (\S+): (.*)")
_TAGGED = re.compile(r"\[(\d+)\] ?")
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
class Failure:
    """The first rank that failed."""

    rank: int
    host: str
    words: str
    code: int


def parse_failure(line: str) -> Failure | None:
    """Read the line by which the process beside a rank tells how it ended."""
    match = _FAILURE.search(line)
    if match is None:
        return None
    code = int(match[4]) if match[4] is not None else 128 + int(match[5])
    return Failure(int(match[1]), match[2], match[3], code)


class Report:
    """Reads every line that arrives: keeps the first failure and each rank's last errors, drops the banner."""

    def __init__(self, banner: Filter) -> None:
        self._failures: list[Failure] = []
        self._banner = banner
        self._tails: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_TAIL))
        self._since: dict[int, int] = defaultdict(int)
        self._notes: set[str] = set()

    @property
    def failure(self) -> Failure | None:
        """The first rank that failed by itself; else the first whose MPI gave up."""
        causes = [failure for failure in self._failures if failure.rank not in self._banner.followers]
        return next(iter(causes or self._failures), None)

    def feed(self, line: str, errors: bool) -> list[str]:
        """Take a line of stdout or (with `errors`) stderr; return the lines to show."""
        if tagged := _TAGGED.match(line):
            self._note_rank(int(tagged[1]), line if errors else None)
            return [line]
        if failure := parse_failure(line):
            self._failures.append(failure)
            return []
        if note := _HOST_NOTE.match(line):
            # The same for every host is said once.
            fresh = note[2] not in self._notes
            self._notes.add(note[2])
            return [line] if fresh else []
        return self._banner.feed(line)

    def _note_rank(self, rank: int, error_line: str | None) -> None:
        for other in self._since:
            if other != rank:
                self._since[other] += 1
        if error_line is not None:
            self._tails[rank].append(error_line)
            self._since[rank] = 0

    def closing(self, np: int, quiet: bool) -> list[str]:
        """Return the last lines: the first failure; where no rank told one, and not `quiet`, the launcher's words."""
        lines = self._banner.finish()
        failure = self.failure
        if failure is None:
            return lines if quiet else [*lines, *self._banner.held]
        tail = list(self._tails[failure.rank])
        starts = [number for number, line in enumerate(tail) if "Traceback (most recent call last)" in line]
        if self._since[failure.rank] and starts:
            lines += [f"[hvdxrun] rank {failure.rank} failed first; its traceback again:\n", *tail[starts[-1] :]]
        if failure.rank in self._banner.followers:
            lines += self._banner.held
        others = "; the others were ended" if np > 1 else ""
        return [*lines, f"[hvdxrun] rank {failure.rank} on {failure.host} {failure.words}{others}\n"]
