"""Plots of a run, PNG, with logarithmic axes for times and sizes. Needs matplotlib, which is loaded only here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.summary import Quartiles, Section, images_per_second
from benchmarks.workloads import SIZES, size_name

COLORS = {
    "hvdx mpi": "#e0664a", "hvdx tensorflow": "#eb9a80", "hvdx horovod": "#f2bba8", "hvdx": "#b32a12",
    "Horovod MPICH": "#4a87c4", "Horovod Intel": "#7fb0dc", "Horovod Gloo": "#a9c3e6", "Horovod": "#1d4f91",
    "TensorFlow": "#e69f1f", "MultiWorker": "#e69f1f", "PyTorch": "#7b4ea3", "raw": "#555555", "memory": "#2a9d6f",
    "empty": "#9a9a9a",
}  # fmt: skip
"""By how a name begins, the first that fits: a family for each library."""
MARKS = "os^DvP*X<>"
DOTS_PER_INCH = 130


Note = Callable[[Section], str]
"""Gives what is to stand in a section's title, such as that it is too noisy to be a result; empty for nothing."""


def draw(sections: Sequence[Section], folder: Path, note: Note) -> list[Path]:
    """Draw what the sections allow; returns the files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    files = []
    for setting in dict.fromkeys(section.setting for section in sections):
        own = [section for section in sections if section.setting == setting and section.seconds]
        single = [section for section in own if section.workload in set(map(size_name, SIZES))]
        sets = [section for section in own if section not in single]
        stem = setting.replace(", ", "-").replace(" ", "-")
        if len(single) > 1:
            files.append(_sizes(single, folder / f"{stem}-sizes.png", note))
        if sets and all(section.images for section in sets):
            files.append(_rates(sets[0], folder / f"{stem}.png", note))
        elif sets:
            files.append(_dots(sets, folder / f"{stem}-gradients.png", note))
    return files


def color(way: str) -> str:
    """Return the colour of a way."""
    return next((shade for name, shade in COLORS.items() if way.removeprefix("fit: ").startswith(name)), "#777777")


def _sizes(sections: Sequence[Section], path: Path, note: Note) -> Path:
    """Draw times over sizes, both logarithmic, with the quartiles as a band."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 6))
    ordered = sorted(sections, key=lambda section: section.bytes)
    ways = list(dict.fromkeys(way for section in ordered for way in section.seconds))
    for number, way in enumerate(ways):
        having = [section for section in ordered if way in section.seconds]
        sizes = [section.bytes for section in having]
        times = [section.time(way) for section in having]
        axes.plot(
            sizes, [1e3 * t.middle for t in times], label=way, color=color(way), marker=MARKS[number % len(MARKS)],
            markersize=4, linewidth=2 if way.startswith("hvdx") else 1.2,
        )  # fmt: skip
        axes.fill_between(
            sizes,
            [1e3 * t.low for t in times],
            [1e3 * t.high for t in times],
            color=color(way),
            alpha=0.12,
            linewidth=0,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [section.bytes for section in ordered]
    axes.set_xticks(ticks, [section.workload for section in ordered], rotation=45, fontsize=8)
    axes.set_xlabel("size of the tensor")
    axes.set_ylabel("milliseconds (median; band: quartiles)")
    _finish(axes, f"All-reduce of one tensor, {ordered[0].setting}", next(filter(None, map(note, ordered)), ""))
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    return _save(figure, path)


def _dots(sections: Sequence[Section], path: Path, note: Note) -> Path:
    """Draw the time of each gradient set, the fastest on top."""
    import matplotlib.pyplot as plt

    heights = [1.5 + len(section.seconds) for section in sections]
    figure, every = plt.subplots(
        len(sections), 1, figsize=(9, 0.28 * sum(heights) + 0.6), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for section, axes in zip(sections, every[:, 0], strict=True):
        times = {way: Quartiles(*(1e3 * value for value in section.time(way))) for way in section.seconds}
        _row_of_dots(axes, dict(sorted(times.items(), key=lambda item: -item[1].middle)))
        _finish(axes, f"{section.workload}, {section.setting}", note(section))
    every[-1, 0].set_xlabel("milliseconds (median; line: quartiles)")
    return _save(figure, path)


def _rates(section: Section, path: Path, note: Note) -> Path:
    """Draw images a second of `fit`, the fastest on top."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.3 * len(section.seconds)))
    rates = {way.removeprefix("fit: "): rate for way, rate in images_per_second(section).items()}
    _row_of_dots(axes, dict(sorted(rates.items(), key=lambda item: item[1].middle)))
    axes.set_xlabel("images a second, all ranks together (median; line: quartiles)")
    _finish(axes, f"{section.workload}: {section.setting}", note(section))
    return _save(figure, path)


def _row_of_dots(axes: Any, found: dict[str, Quartiles]) -> None:
    """Draw a dot a row: the length of a bar would mean nothing on a logarithmic axis."""
    for row, (way, value) in enumerate(found.items()):
        errors = [[value.middle - value.low], [value.high - value.middle]]
        axes.errorbar(value.middle, row, xerr=errors, color=color(way), marker="o", markersize=6, linewidth=2)
        text = f"{value.middle:,.0f}" if value.middle >= 1000 else f"{value.middle:.3g}"
        axes.annotate(text, (value.high, row), (8, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xscale("log")
    lowest, highest = min(value.low for value in found.values()), max(value.high for value in found.values())
    room = max(highest / lowest, 1.5) ** 0.12  # for the number beside the last dot
    axes.set_xlim(left=lowest / room**0.3, right=highest * room)
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.set_ylim(-0.7, len(found) - 0.3)


def _finish(axes: Any, title: str, note: str) -> None:
    axes.set_title(title if not note else f"{title} ({note})", fontsize=10)
    axes.grid(True, which="major", axis="both", alpha=0.3)
    axes.set_axisbelow(True)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)
    return path
