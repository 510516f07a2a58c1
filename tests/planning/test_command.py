"""`hvdx plan`: the table, and options that cannot be used."""

from __future__ import annotations

import pytest

from hvdx import cli

JOB = {"--params": "25.6M", "--ranks": "512", "--hosts": "64", "--bandwidth": "25Gbit", "--step-time": "120ms"}


def run(changes: dict[str, str] | None = None) -> int:
    words = [word for pair in {**JOB, **(changes or {})}.items() for word in pair]
    return cli.main(["plan", *words])


def test_the_table_and_what_follows_from_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run({"--latency": "5us", "--add-bandwidth": "1000GB/s"}) == 0
    out = capsys.readouterr().out
    assert "25,600,000 parameters x 4 B = 102.4 MB a step, 512 ranks on 64 host(s)" in out
    rows = {cells[1]: cells for line in out.splitlines() if len(cells := [c.strip() for c in line.split("│")]) > 5}
    # 2 x 511 steps of 200 kB: 65.41 ms for the bytes, 5.11 ms of latencies, and 0.1 ms of additions
    assert rows["ring"][2:7] == ["204.4", "70.6 ms", "70.6 ms", "191 ms", "63.0 %"]
    assert rows["recursive_doubling"][2] == "921.6"
    assert rows["servers, each rank"][2] == ""
    assert "Best all-reduce: ring (HVDX_ALLREDUCE=ring), 191 ms a step, 63.0 % of 512 times one rank." in out
    assert "With 64 server machine(s) more" in out
    assert "latency 5 us between hosts" in out


def test_few_bytes_on_many_ranks_want_few_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert run({"--params": "100", "--hosts": "512"}) == 0
    assert "Best all-reduce: recursive_doubling" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--bandwidth": "25Gb"}, "argument --bandwidth: '25Gb' has the unit 'Gb'"),
        ({"--step-time": "120"}, "argument --step-time: '120' has no unit"),
        ({"--step-time": "0ms"}, "--step-time must be above 0"),
        ({"--overlap": "60%"}, "argument --overlap: '60%' is not a share"),
        ({"--hosts": "60"}, "--ranks 512 cannot be divided evenly over --hosts 60"),
        ({"--servers": "0"}, "argument --servers: '0' is 0"),
    ],
)
def test_options_that_cannot_be_used(changes: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(changes)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
