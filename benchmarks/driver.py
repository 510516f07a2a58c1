"""The driver: starts the jobs of a setting side by side, measures its workloads, and writes the report."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import link, machine, memory, report
from benchmarks.catalogue import REDUCTIONS, TRAININGS, Homes
from benchmarks.guardian import guardian
from benchmarks.job import Job, JobError
from benchmarks.launching import Hosts, commands, rank_line, ranks_of
from benchmarks.measuring import measure
from benchmarks.settings import Setting, check, homes, parser, settings
from benchmarks.summary import Section

MINUTES = 7.0
MINUTES_IN_FULL = 45.0


@dataclass
class Run:
    """What a run has found so far."""

    facts: dict[str, object]
    sections: list[Section] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)


def say(text: str) -> None:
    """Print a line for the user."""
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = parser().parse_args(arguments)
    wrong = check(options)
    if wrong:
        print(wrong, file=sys.stderr)
        return 2
    places = homes(options, sys.executable)
    if options.list:
        for kind in (*REDUCTIONS, *TRAININGS):
            say(f"{kind.name}: {places.missing(kind) or 'can run'}")
        return 0
    run = Run(machine.facts() | {"busy before": machine.busy_before()})
    minutes = options.minutes or (MINUTES_IN_FULL if options.full else MINUTES)
    chosen = settings(options)
    each = 60 * minutes / max(1, sum(len(setting.workloads) for setting in chosen))
    with guardian(), _ended_by_signals():
        _run_all(chosen, places, options.rounds, each, run)
    written = report.write(run.facts, run.versions, run.missing, run.sections, options.output)
    say(written.text)
    say(f"written: {', '.join(map(str, written.files))}")
    return 0


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End in order, jobs and hosts included, when somebody ends the driver."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_all(chosen: Sequence[Setting], places: Homes, rounds: int, each: float, run: Run) -> None:
    for setting in chosen:
        reason = link.absent() if setting.hosts > 1 else None
        if reason:
            say(f"{setting.name}: left out, {reason}")
            run.missing[setting.name] = reason
            continue
        kinds = tuple(kind for kind in setting.kinds if not places.missing(kind))
        for kind in setting.kinds:
            if kind not in kinds:
                run.missing[kind.name] = str(places.missing(kind))
                say(f"{setting.name}: {kind.name} is not available: {run.missing[kind.name]}")
        fitting, left_out = memory.parts(replace(setting, kinds=kinds), machine.available_bytes())
        for name, why in left_out.items():
            say(f"left out: {name}: {why}")
        run.missing |= left_out
        for part in fitting:
            _run_setting(part, places, rounds, each, run)


def _run_setting(setting: Setting, places: Homes, rounds: int, seconds: float, run: Run) -> None:
    """Measure all workloads of a setting."""
    say(f"{setting.name}: {', '.join(w.name for w in setting.workloads)}: starting {len(setting.kinds)} jobs")
    with tempfile.TemporaryDirectory(prefix="hvdx-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        between = None
        if setting.hosts > 1:
            (folder / "hosts").mkdir()
            between = stack.enter_context(link.limited_link(folder / "hosts"))
        hosts = Hosts(between.pair if between else None)
        jobs = stack.enter_context(_jobs(setting, places, hosts, folder, run))
        for workload in setting.workloads:
            began = time.monotonic()
            section = measure(setting, workload, jobs, rounds, seconds, between, say)
            run.sections.append(section)
            done = min((len(taken) for taken in section.seconds.values()), default=0)
            say(f"  {workload.name}: {done} rounds in {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def _jobs(setting: Setting, places: Homes, hosts: Hosts, folder: Path, run: Run) -> Iterator[list[Job]]:
    """Start the jobs of a setting that can run here, and end them."""
    jobs: list[Job] = []
    try:
        for number, kind in enumerate(setting.kinds):
            own = folder / str(number)
            own.mkdir()
            job = Job(kind, ranks_of(kind, setting.ranks), own)
            jobs.append(job)
            began = time.monotonic()
            try:
                job.start(commands(kind, job.ranks, rank_line(kind, own), places, hosts))
                run.versions[kind.name] = job.versions
                say(f"  {kind.name}: {job.ranks} rank(s) are there after {time.monotonic() - began:.1f} s")
            except JobError as error:
                say(f"  {error}")
                run.missing[f"{kind.name}, {setting.name}"] = str(error)
                jobs.remove(job)
                job.end()
        yield jobs
    finally:
        for job in jobs:
            job.dismiss()
        for job in jobs:
            job.end()
