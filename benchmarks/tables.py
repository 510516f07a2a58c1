"""Fills the tables of a document from runs: `python -m benchmarks.tables benchmark.json [...] docs/benchmarks.md`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. NAME is "machine", "targets", or a setting
and a workload, such as "2 ranks, ResNet-50". Each setting and workload is taken whole from the first run in which it is
a result; where it is one in none, the table says why not. A run on a busy machine is refused, and so are runs that lack
a table. They must be of one machine; its facts are those of the first.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.summary import Section
from benchmarks.targets import TARGETS, judge

TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


class RefusedError(ValueError):
    """A run from which no document may be filled."""


def fill(text: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return a document with its tables filled.

    Args:
        text: the document.
        runs: what each benchmark.json holds.

    Raises:
        RefusedError: the machine was busy before a run, the runs are of different machines, or they lack a table.
    """
    noise = [reason for run in runs for reason in report.run_noise(run["machine"])]
    if noise:
        raise RefusedError(f"this run is not a result: {'; '.join(noise)}")
    for fact in ("processor", "cores", "memory", "system", "settings"):
        found = [run["machine"][fact] for run in runs]
        if any(other != found[0] for other in found):
            raise RefusedError(f"the runs are of different machines or settings, {fact}: {found}")
    for job in {job for run in runs for job in run["versions"]}:
        found = [run["versions"][job] for run in runs if job in run["versions"]]
        if any(other != found[0] for other in found):
            raise RefusedError(f"the runs are of different versions, {job}: {found}")
    tables = _tables(runs)
    names = [match[2] for match in TABLE.finditer(text)]
    if not names:
        raise RefusedError("the document has no place for a table: <!-- table: NAME --> ... <!-- end of table -->")
    absent = [name for name in names if name not in tables]
    if absent:
        raise RefusedError(f"there is no {', '.join(map(repr, absent))} in it; there is {', '.join(map(repr, tables))}")
    return TABLE.sub(lambda match: f"{match[1]}{_without_title(tables[match[2]])}\n{match[3]}", text)


def _tables(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    chosen: dict[str, Section] = {}
    for run in runs:
        for section in map(Section.from_json, run["sections"]):
            name = f"{section.setting}, {section.workload}"
            if name not in chosen or (report.section_noise(chosen[name]) and not report.section_noise(section)):
                chosen[name] = section
    tables = {name: _section(section) for name, section in chosen.items()}
    tables["machine"] = report.machine_text(runs[0]["machine"], runs[0]["versions"])
    tables["targets"] = report.targets_table([judge(target, list(chosen.values())) for target in TARGETS])
    return tables


def _section(section: Section) -> str:
    reasons = report.section_noise(section)
    if reasons:
        return f"## \n\nThis part of the run is not a result: {'; '.join(reasons)}."
    return report.section_text(section)


def _without_title(text: str) -> str:
    """Return a table without its heading: the document has headings of its own."""
    return text.split("\n", 2)[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill a document; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+", help="benchmark.json")
    parser.add_argument("document", type=Path)
    options = parser.parse_args(arguments)
    try:
        runs = [json.loads(run.read_text()) for run in options.run]
        options.document.write_text(fill(options.document.read_text(), runs))
    except RefusedError as error:
        print(f"{options.document} stays as it is: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
