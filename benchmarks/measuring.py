"""Measures one workload: rounds in which every way of every job has a turn, in rotating order, one job at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import machine
from benchmarks.job import Job, JobError
from benchmarks.link import Link
from benchmarks.settings import Setting
from benchmarks.summary import Section
from benchmarks.workloads import Workload

LEAST_ROUNDS = 5
TURN_SECONDS = 0.35
"""How long a turn calls a way, not counting what warms it up."""
MOST_CALLS = 100
SLOW_SECONDS = 0.5
"""A call that takes longer needs no second one to warm up."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Turn:
    job: Job
    way: str
    warm: int
    calls: int


def measure(
    setting: Setting, workload: Workload, jobs: list[Job], rounds: int, seconds: float, link: Link | None, say: Say
) -> Section:
    """Return the times of all ways; a job that fails is ended, named in the section, and taken out of `jobs`.

    Args:
        setting, workload: what to measure.
        jobs: the running jobs.
        rounds: the most rounds.
        seconds: when they have passed, no round begins, but for the first LEAST_ROUNDS.
        link: where bytes are counted, with two hosts.
        say: gets lines for the user.
    """
    section = Section(
        setting.name, workload.name, setting.ranks, setting.hosts, cores=machine.cores_of_machine(),
        tensors=0 if setting.images else len(workload.shapes), bytes=0 if setting.images else workload.bytes,
        images=setting.images,
    )  # fmt: skip
    # Making a workload's tensors anew for each turn takes longer than the turn: only where memory is short.
    keep = 2 * sum(job.ranks for job in jobs) * workload.bytes < machine.available_bytes()
    end = time.monotonic() + seconds
    turns = []
    for job in list(jobs):
        try:
            turns += _prepare(job, workload, keep, say)
        except JobError as error:
            _give_up(job, error, jobs, section, say)
    done = 0
    while turns and done < rounds and (done < min(rounds, LEAST_ROUNDS) or time.monotonic() < end):
        shift = done % len(turns)
        for turn in turns[shift:] + turns[:shift]:
            if turn.job in jobs:
                try:
                    _take(turn, section, workload, keep, link)
                except JobError as error:
                    _give_up(turn.job, error, jobs, section, say, [t.way for t in turns if t.job is turn.job])
        turns = [turn for turn in turns if turn.job in jobs]
        done += 1
    for job in jobs:
        job.ask("drop")
    return section


def _prepare(job: Job, workload: Workload, keep: bool, say: Say) -> list[_Turn]:
    """Have a job make its ways, see that they compute the right thing, and find out how often to call each."""
    answers = job.ask("prepare", shapes=workload.shapes)
    prints = [answer["fingerprints"] for answer in answers]
    if any(other != prints[0] for other in prints):
        raise JobError(f"{job.kind.name}: the ranks have trained different models: {prints}")
    turns = []
    for way in answers[0]["ways"]:
        tried = job.ask("turn", way=way, warm=1, calls=2)
        estimate = max(min(answer["seconds"]) for answer in tried)
        calls = max(1, min(MOST_CALLS, int(TURN_SECONDS / max(estimate, 1e-6))))
        turns.append(_Turn(job, way, 1 if estimate > SLOW_SECONDS else 2, calls))
        say(f"  {workload.name}, {way}: the right result, in about {1e3 * estimate:.3g} ms")
    if not keep:
        job.ask("drop")
    return turns


def _take(turn: _Turn, section: Section, workload: Workload, keep: bool, link: Link | None) -> None:
    """Give a way its turn and write down what it took."""
    if not keep:
        turn.job.ask("prepare", shapes=workload.shapes)
    before, sent, began = machine.busy_seconds(), link.sent() if link else [], time.monotonic()
    answers = turn.job.ask("turn", way=turn.way, warm=turn.warm, calls=turn.calls)
    section.wall += time.monotonic() - began
    section.busy += machine.busy_seconds() - before
    section.own += sum(answer["cpu"] for answer in answers)
    if link:
        calls = turn.warm + turn.calls
        passed = [(after - first) / calls for after, first in zip(link.sent(), sent, strict=True)]
        section.sent.setdefault(turn.way, []).append(passed)
    slowest = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
    section.seconds.setdefault(turn.way, []).append(slowest)
    if not keep:
        turn.job.ask("drop")


def _give_up(job: Job, error: JobError, jobs: list[Job], section: Section, say: Say, ways: Sequence[str] = ()) -> None:
    say(f"  given up: {error}")
    section.failed[job.kind.name] = str(error)
    for way in ways:
        section.seconds.pop(way, None)
        section.sent.pop(way, None)
    jobs.remove(job)
    job.end()
