"""The report: verdicts, what was left out, plots; and that a noisy run is refused, also by what fills documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, tables
from benchmarks.summary import Quartiles, Section
from tests.benchmarks.sections import section

FACTS: dict[str, Any] = {
    "date": "today", "processor": "P", "cores": 2, "memory": 2**34, "system": "Linux 6", "python": "3",
    "load before": [0.1, 0.2, 0.3], "settings": {"HOROVOD_CYCLE_TIME": "1"}, "busy before": 0.01,
}  # fmt: skip
VERSIONS = {"hvdx mpi": {"numpy": "2"}, "yardsticks": {"numpy": "2"}}


def sections() -> list[Section]:
    """Return two gradient sets, two sizes, and a training."""
    times: dict[str, Any] = {"hvdx mpi": [0.04] * 3, "Horovod Open MPI (grouped)": [0.12] * 3, "raw MPI": [0.03] * 3}
    fit: dict[str, Any] = {"fit: hvdx, Keras 3": [0.2] * 3, "fit: no exchange, Keras 3": [0.15] * 3}
    made = [
        section(times), section(times, workload="VGG-16"), section(times, workload="4 B"),
        section(times, workload="16 B"), section(fit, "fit, 2 ranks", "small CNN"),
    ]  # fmt: skip
    made[2].bytes, made[3].bytes = 4, 16
    made[4].images, made[4].bytes = 3200, 0
    return made


def test_a_quiet_run_is_a_result(tmp_path: Path) -> None:
    written = report.write(FACTS, VERSIONS, {"PyTorch DDP gloo": "there is no torch; install it"}, sections(), tmp_path)
    text = (tmp_path / "benchmark.md").read_text()
    assert "NOT a result" not in text
    rivals = "hvdx mpi against Horovod Open MPI (grouped)"
    assert f"| at least 2.5 times the speed of Horovod Open MPI | 3.00 [3.00, 3.00]: {rivals} | met |" in text
    assert "- PyTorch DDP gloo: there is no torch; install it" in text
    assert "| hvdx mpi; yardsticks | numpy 2 |" in text
    assert "| raw MPI | 30.0 [30.0, 30.0] | 0.750 [0.750, 0.750] |" in text
    assert "| hvdx, Keras 3 | 32000 [32000, 32000] | 25 % [25, 25] |" in text
    assert "HOROVOD_CYCLE_TIME=1" in text
    facts = json.loads((tmp_path / "benchmark.json").read_text())
    assert facts["result"] is True
    assert [Section.from_json(one) for one in facts["sections"]] == sections()
    names = {path.name for path in written.files if path.suffix == ".png"}
    assert names == {"2-ranks-gradients.png", "2-ranks-sizes.png", "fit-2-ranks.png"}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


@pytest.mark.parametrize("how", ["busy before", "busy meanwhile", "unsteady", "nothing"])
def test_what_is_noisy_is_no_result(tmp_path: Path, how: str) -> None:
    facts, measured = dict(FACTS), sections()
    if how == "busy before":
        facts["busy before"] = 0.5
    elif how == "busy meanwhile":
        measured[1].busy = 2.0
    elif how == "unsteady":
        measured[0].seconds["Horovod Open MPI (grouped)"] = [[0.05], [0.06], [0.3]]
    else:
        measured = []
    report.write(facts, VERSIONS, {}, measured, tmp_path)
    assert "**This run is NOT a result**" in (tmp_path / "benchmark.md").read_text()
    run = json.loads((tmp_path / "benchmark.json").read_text())
    assert run["result"] is False
    met = [one["setting"] + one["workload"] for one in run["targets"] if one["verdict"] in {"met", "NOT met"}]
    assert "2 ranksResNet-50" not in met or how == "busy meanwhile"
    assert "2 ranksVGG-16" not in met or how == "unsteady"
    if how == "busy before":
        with pytest.raises(tables.RefusedError, match=r"not a result: 50 % of the machine was in use"):
            tables.fill("<!-- table: targets -->\n<!-- end of table -->", [run])
    elif how != "nothing":
        noisy, quiet = ("VGG-16", "ResNet-50") if how == "busy meanwhile" else ("ResNet-50", "VGG-16")
        for workload, begins in ((noisy, "This part of the run is not a result: "), (quiet, "| peer |")):
            page = f"<!-- table: 2 ranks, {workload} -->\n"
            assert tables.fill(page + "<!-- end of table -->", [run]).startswith(page + begins)


def test_a_way_that_is_in_no_target_may_be_unsteady(tmp_path: Path) -> None:
    measured = sections()
    measured[0].seconds["raw MPI"] = [[0.01], [0.02], [0.03]]
    report.write(FACTS, VERSIONS, {}, measured, tmp_path)
    assert json.loads((tmp_path / "benchmark.json").read_text())["result"] is True
    assert "| raw MPI (unsteady: spread above 30 %) |" in (tmp_path / "benchmark.md").read_text()


def test_tables_of_a_document_are_filled_again_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.write(FACTS, VERSIONS, {}, sections(), tmp_path)
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- table: 2 ranks, VGG-16 -->\nold\n<!-- end of table -->\nafter\n")
    run = str(tmp_path / "benchmark.json")
    assert tables.main([run, str(document)]) == 0
    filled = document.read_text()
    assert filled.startswith("before\n<!-- table: 2 ranks, VGG-16 -->\n| peer |")
    assert filled.endswith("<!-- end of table -->\nafter\n")
    assert "old" not in filled
    assert tables.main([run, str(document)]) == 0
    assert document.read_text() == filled
    document.write_text("<!-- table: 9 ranks, x -->\n<!-- end of table -->")
    assert tables.main([run, str(document)]) == 1
    assert "there is no '9 ranks, x'" in capsys.readouterr().err


def test_a_noisy_table_comes_from_another_run(tmp_path: Path) -> None:
    runs = []
    for number, times in enumerate(([0.05, 0.06, 0.3], [0.5] * 3)):
        measured = sections()
        measured[0].seconds["Horovod Open MPI (grouped)"] = [[time] for time in times]
        measured[1].seconds["raw MPI"] = [[0.01 * (number + 1)]] * 3
        report.write(FACTS, VERSIONS, {}, measured, tmp_path)
        runs.append(json.loads((tmp_path / "benchmark.json").read_text()))
    page = "".join(
        f"<!-- table: {name} -->\n<!-- end of table -->\n"
        for name in ("2 ranks, ResNet-50", "2 ranks, VGG-16", "targets")
    )
    filled = tables.fill(page, runs)
    assert "| Horovod Open MPI (grouped) | 500 [500, 500] |" in filled
    assert "| raw MPI | 10.0 [10.0, 10.0] |" in filled
    assert "12.5 [12.5, 12.5]: hvdx mpi against Horovod Open MPI (grouped) | met |" in filled
    runs[1]["machine"]["cores"] = 64
    with pytest.raises(tables.RefusedError, match=r"different machines or settings, cores: \[2, 64\]"):
        tables.fill(page, runs)
    runs[1]["machine"]["cores"] = 2
    runs[1]["versions"]["yardsticks"] = {"numpy": "3"}
    with pytest.raises(tables.RefusedError, match="different versions, yardsticks"):
        tables.fill(page, runs)


@pytest.mark.parametrize(("value", "text"), [(123456, "123456"), (34.56, "34.6"), (0.0123, "0.0123"), (0, "0")])
def test_three_digits(value: float, text: str) -> None:
    assert report.spread(Quartiles(value, value, value)) == f"{text} [{text}, {text}]"
