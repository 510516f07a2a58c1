"""Which rank failed first, and what is shown last."""

from __future__ import annotations

from hvdx.launch import open_mpi
from hvdx.launch.report import Report, parse_ending

TRACE = ["[1] Traceback (most recent call last):\n", '[1]   File "x.py", line 1\n', "[1] ValueError: boom\n"]
RANK_1 = "[hvdxrun] rank 1 on b exited with code 3\n"


def report_of(*lines: str) -> tuple[Report, list[str]]:
    report = Report(open_mpi.Filter())
    return report, [shown for line in lines for shown in report.feed(line, errors=True)]


def test_failures_are_read() -> None:
    failure = parse_ending(RANK_1)
    assert failure is not None
    assert (failure.role, failure.index, failure.host, failure.code) == ("rank", 1, "b", 3)
    killed = parse_ending("[hvdxrun] rank 12 on c was ended by signal 9 (SIGKILL)\n")
    assert killed is not None
    assert killed.code == 137
    assert parse_ending("[1] rank 1 on b exited with code 3\n") is None


def test_the_first_failure_is_the_last_line() -> None:
    report, shown = report_of(*TRACE, RANK_1, "[hvdxrun] rank 0 on a exited with code 9\n")
    assert shown == TRACE
    assert report.closing(2, quiet=False) == ["[hvdxrun] rank 1 on b exited with code 3; the others were ended\n"]


def test_a_traceback_that_others_pushed_up_is_shown_again() -> None:
    report, _ = report_of("[1] before\n", *TRACE, "[0] noise\n", RANK_1)
    closing = report.closing(2, quiet=False)
    assert closing[1:4] == TRACE
    assert closing[-1].startswith("[hvdxrun] rank 1 on b exited")


def test_a_rank_whose_mpi_gave_up_is_not_the_first() -> None:
    fatal = "[a:00000] *** reported by process [736755713,0]\n"
    report, shown = report_of(fatal, "[hvdxrun] rank 0 on a exited with code 14\n", RANK_1)
    assert shown == []
    assert report.failure is not None
    assert report.failure.index == 1
    assert report.closing(2, quiet=False) == ["[hvdxrun] rank 1 on b exited with code 3; the others were ended\n"]


def test_where_no_other_failed_its_mpis_words_are_shown() -> None:
    fatal = "[a:00000] *** reported by process [736755713,0]\n"
    report, _ = report_of(fatal, "[hvdxrun] rank 0 on a exited with code 14\n")
    assert report.closing(2, quiet=False)[0] == fatal


def test_the_launchers_own_words_are_kept_where_no_rank_could_tell() -> None:
    rule = "-" * 74 + "\n"
    banner = [rule, "prterun noticed that process rank 1 with PID 7 on node x exited on\n", rule]
    report, shown = report_of(*banner)
    assert shown == []
    assert report.closing(2, quiet=False) == banner
    assert report.closing(2, quiet=True) == []


def test_the_same_note_of_many_hosts_is_said_once() -> None:
    _, shown = report_of(
        "[hvdxrun] a: 2 ranks share 4 cores\n", "[hvdxrun] b: 2 ranks share 4 cores\n", "[hvdxrun] c: x\n"
    )
    assert shown == ["[hvdxrun] a: 2 ranks share 4 cores\n", "[hvdxrun] c: x\n"]
