"""Writes what a run has found: benchmark.json (everything), benchmark.md (tables and verdicts) and the plots."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.machine import BUSY_LIMIT
from benchmarks.summary import SPREAD_LIMIT, Quartiles, Section, exchange_share, images_per_second
from benchmarks.targets import SUBJECTS, TARGETS, Verdict, What, judge

NAME = "benchmark"


@dataclass(frozen=True)
class Written:
    """The report's text and the files that were made."""

    text: str
    files: list[Path]


def write(
    facts: Mapping[str, Any],
    versions: Mapping[str, Mapping[str, str]],
    missing: Mapping[str, str],
    sections: Sequence[Section],
    folder: Path,
) -> Written:
    """Write all files of a run.

    Args:
        facts: of the machine.
        versions: of each job's packages.
        missing: why jobs or settings were left out.
        sections: what was measured.
        folder: where to.
    """
    noise = run_noise(facts)
    verdicts = [judge(target, sections, noise) for target in TARGETS]
    text = markdown(facts, versions, missing, sections, verdicts)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "result": not unusable(facts, sections),
        "why not": unusable(facts, sections),
        "machine": dict(facts),
        "versions": dict(versions),
        "missing": dict(missing),
        "targets": [_verdict_facts(verdict) for verdict in verdicts],
        "sections": [dataclasses.asdict(section) for section in sections],
    }
    files = [folder / f"{NAME}.json", folder / f"{NAME}.md"]
    files[0].write_text(json.dumps(whole, indent=1) + "\n")
    files[1].write_text(text)
    try:
        files += plots.draw(
            sections, folder, lambda section: "not a result: noisy" if noise or section_noise(section) else ""
        )
    except ImportError as error:
        text += f"\nNo plots: {error}; `pip install matplotlib` brings what they need.\n"
    return Written(text, files)


def run_noise(facts: Mapping[str, Any]) -> list[str]:
    """Return why nothing of a run is to be trusted."""
    busy = float(facts["busy before"])
    return [f"{100 * busy:.0f} % of the machine was in use before the start"] if busy > BUSY_LIMIT else []


def unusable(facts: Mapping[str, Any], sections: Sequence[Section]) -> list[str]:
    """Return why a run is no result; empty where it is one."""
    reasons = run_noise(facts)
    if not sections:
        reasons.append("nothing was measured")
    for section in sections:
        reasons += [f"{section.setting}, {section.workload}: {reason}" for reason in section_noise(section)]
    return reasons


def section_noise(section: Section) -> list[str]:
    """Return why a section is no result; empty where it is one. Only what a target compares must be steady."""
    reasons = section.noise()
    for verdict in (judge(target, [section]) for target in TARGETS):
        reasons += [f"{way} is unsteady" for way in verdict.unsteady]
    return list(dict.fromkeys(reasons))


def markdown(
    facts: Mapping[str, Any],
    versions: Mapping[str, Mapping[str, str]],
    missing: Mapping[str, str],
    sections: Sequence[Section],
    verdicts: Sequence[Verdict],
) -> str:
    """Return the report for people."""
    reasons = unusable(facts, sections)
    parts = [f"# Benchmark of {facts['date']}"]
    if reasons:
        parts.append("**This run is NOT a result** where it was noisy, and those numbers are to be quoted nowhere.\n"
                     "Repeat it on a quiet machine.\n\n" + "\n".join(f"- {reason}" for reason in reasons))  # fmt: skip
    parts += [machine_text(facts, versions), targets_table(verdicts)]
    parts += [section_text(section) for section in sections]
    if missing:
        lines = [f"- {name}: {why.splitlines()[0]}" for name, why in missing.items()]
        parts.append("## Not measured\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def machine_text(facts: Mapping[str, Any], versions: Mapping[str, Mapping[str, str]]) -> str:
    """Return what the numbers depend on."""
    load = ", ".join(f"{value:.2f}" for value in facts["load before"])
    settings = ", ".join(f"{name}={value}" for name, value in facts["settings"].items()) or "none"
    lines = [
        "## Machine",
        "",
        f"{facts['processor']}, {facts['cores']} cores, {facts['memory'] / 2**30:.0f} GiB, {facts['system']}; before "
        f"the start {100 * facts['busy before']:.0f} % in use, load {load}. Settings in the environment: {settings}.",
        "",
        "| jobs | versions |",
        "|---|---|",
    ]
    alike: dict[str, list[str]] = {}
    for job, found in versions.items():
        alike.setdefault(", ".join(f"{name} {version}" for name, version in found.items()), []).append(job)
    lines += [f"| {'; '.join(jobs)} | {words} |" for words, jobs in alike.items()]
    return "\n".join(lines)


def targets_table(verdicts: Sequence[Verdict]) -> str:
    """Return every target with what was found."""
    lines = [
        "## Targets",
        "",
        "| where | work | target | found (median, quartiles) | verdict |",
        "|---|---|---|---|---|",
    ]
    for verdict in verdicts:
        target = verdict.target
        found = "" if verdict.ratio is None else f"{spread(verdict.ratio)}: {verdict.subject}"
        if verdict.rival and verdict.ratio is not None:
            found += f" against {verdict.rival}"
        lines.append(f"| {target.setting} | {target.workload} | {target.wording()} | {found} | {verdict.verdict} |")
    return "\n".join(lines)


def section_text(section: Section) -> str:
    """Return the table of one section."""
    title = f"## {section.setting}, {section.workload}"
    if section.bytes:
        title += f": {section.tensors} tensor(s), {amount(section.bytes)}"
    lines = [title, ""]
    if section.noise():
        lines += [f"Not a result: {'; '.join(section.noise())}.", ""]
    lines += _fit_rows(section) if section.images else _reduction_rows(section)
    rounds = min((len(taken) for taken in section.seconds.values()), default=0)
    lines += ["", f"{rounds} rounds; others took {100 * section.foreign:.1f} % of the machine meanwhile."]
    for name, why in section.failed.items():
        lines += ["", f"{name} failed: {why.splitlines()[0]}"]
    return "\n".join(lines)


def _reduction_rows(section: Section) -> list[str]:
    subject = next((name for name in SUBJECTS if name in section.seconds), None)
    head, rule = "| peer | ms, median [quartiles] |", "|---|---|"
    if subject:
        head, rule = f"{head} time as a multiple of {subject} |", f"{rule}---|"
    if section.sent:
        head, rule = f"{head} MB a host sent |", f"{rule}---|"
    lines = [head, rule]
    for way in sorted(section.seconds, key=lambda name: section.time(name).middle):
        line = f"| {way}{_mark(section, way)} | {spread(section.time(way), 1e3)} |"
        if subject:
            line += f" {spread(section.ratio(way, subject))} |"
        if section.sent:
            line += f" {section.bytes_sent(way).middle / 1e6:.2f} |"
        lines.append(line)
    return lines


def _fit_rows(section: Section) -> list[str]:
    lines = ["| who | images a second, all ranks | step spent on the exchange and waiting |", "|---|---|---|"]
    rates = images_per_second(section)
    for way, rate in sorted(rates.items(), key=lambda item: -item[1].middle):
        share = exchange_share(section, way)
        told = "" if share is None else f"{100 * share.middle:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]"
        lines.append(f"| {way.removeprefix('fit: ')}{_mark(section, way)} | {spread(rate)} | {told} |")
    return lines


def _mark(section: Section, way: str) -> str:
    return f" (unsteady: spread above {100 * SPREAD_LIMIT:.0f} %)" if section.unsteady(way) else ""


def spread(found: Quartiles, factor: float = 1.0) -> str:
    """Return median and quartiles as text with three significant digits."""
    middle, low, high = (_digits(factor * value) for value in (found.middle, found.low, found.high))
    return f"{middle} [{low}, {high}]"


def _digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def amount(count: int) -> str:
    """Return bytes in words of 1000."""
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _verdict_facts(verdict: Verdict) -> dict[str, Any]:
    target = verdict.target
    return {
        "setting": target.setting, "workload": target.workload, "target": target.wording(),
        "verdict": verdict.verdict, "hvdx": verdict.subject, "against": verdict.rival,
        "ratio": None if verdict.ratio is None else list(verdict.ratio),
        "lower is better": target.what is not What.SPEED,
    }  # fmt: skip
