"""Fills the tables of a document from a run: `python -m benchmarks.tables benchmark.json docs/benchmarks.md`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. NAME is "machine", "targets", or a setting
and a workload, such as "2 ranks, ResNet-50". A noisy run is refused, and so is one that lacks a table.
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


def fill(text: str, run: dict[str, Any]) -> str:
    """Return a document with its tables filled.

    Args:
        text: the document.
        run: what benchmark.json holds.

    Raises:
        RefusedError: the run is noisy, or lacks a table.
    """
    if not run["result"]:
        raise RefusedError(f"this run is not a result: {'; '.join(run['why not'])}")
    tables = _tables(run)
    names = [match[2] for match in TABLE.finditer(text)]
    if not names:
        raise RefusedError("the document has no place for a table: <!-- table: NAME --> ... <!-- end of table -->")
    absent = [name for name in names if name not in tables]
    if absent:
        raise RefusedError(f"this run has no {', '.join(map(repr, absent))}; it has {', '.join(map(repr, tables))}")
    return TABLE.sub(lambda match: f"{match[1]}{_without_title(tables[match[2]])}\n{match[3]}", text)


def _tables(run: dict[str, Any]) -> dict[str, str]:
    sections = [Section.from_json(facts) for facts in run["sections"]]
    tables = {f"{section.setting}, {section.workload}": report.section_text(section) for section in sections}
    tables["machine"] = report.machine_text(run["machine"], run["versions"])
    tables["targets"] = report.targets_table([judge(target, sections) for target in TARGETS])
    return tables


def _without_title(text: str) -> str:
    """Return a table without its heading: the document has headings of its own."""
    return text.split("\n", 2)[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill a document; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="benchmark.json")
    parser.add_argument("document", type=Path)
    options = parser.parse_args(arguments)
    try:
        options.document.write_text(fill(options.document.read_text(), json.loads(options.run.read_text())))
    except RefusedError as error:
        print(f"{options.document} stays as it is: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
