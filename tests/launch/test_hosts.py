"""Reading -H and host files, and dividing the ranks over the hosts."""

from __future__ import annotations

import pytest

from hvdx.errors import LaunchError
from hvdx.launch.hosts import Host, assign, parse_hostfile, parse_hosts


def test_hosts_with_and_without_slots() -> None:
    assert parse_hosts("a:2,b-1.example.org:3,c") == (Host("a", 2), Host("b-1.example.org", 3), Host("c", None))


def test_an_address_of_ipv6_keeps_its_colons() -> None:
    assert parse_hosts("[fe80::1]:2,[::1]") == (Host("[fe80::1]", 2), Host("[::1]", None))


@pytest.mark.parametrize(
    ("text", "understood", "write"),
    [
        ("a:2 b:2", "separates hosts by spaces", "-H a:2,b:2"),
        ("a, b", "separates hosts by spaces", "-H a,b"),
        ("a,", "empty place", "-H a:2,b:2"),
        ("", "no host", "-H a:2,b:2"),
        ("a:0", "'0' is no number of slots", "1 or more"),
        ("a:-1", "'-1' is no number of slots", "1 or more"),
        ("a:two", "'two' is no number of slots", "1 or more"),
        ("a:", "'' is no number of slots", "1 or more"),
        ("a:1,a:2", "names the host a twice", "all its slots"),
        ("a;b", "no host name", "-H a:2,b:2"),
    ],
)
def test_unusable_hosts_say_what_was_understood_and_what_to_write(text: str, understood: str, write: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hosts(text)
    assert understood in str(caught.value)
    assert write in str(caught.value)


def test_hostfile_forms_comments_and_blank_lines() -> None:
    text = "# the cluster\n\na slots=2   # two GPUs\nb:3\n  c\n"
    assert parse_hostfile(text, "hosts") == (Host("a", 2), Host("b", 3), Host("c", None))


@pytest.mark.parametrize(
    ("text", "understood"),
    [
        ("a slots=0\n", "line 1 of hosts"),
        ("a:1\nb slots=x\n", "line 2 of hosts"),
        ("a 2\n", "is not understood"),
        ("a slots=2 b\n", "is not understood"),
        ("# nothing\n", "names no host"),
        ("a:1\na:2\n", "names the host a twice"),
    ],
)
def test_unusable_hostfile_names_the_line(text: str, understood: str) -> None:
    with pytest.raises(LaunchError, match=understood):
        parse_hostfile(text, "hosts")


@pytest.mark.parametrize(
    ("np", "hosts", "expected"),
    [
        (3, "localhost", [("localhost", 3)]),
        (4, "a:2,b:2", [("a", 2), ("b", 2)]),
        (3, "a:2,b:2", [("a", 2), ("b", 1)]),
        (2, "a:2,b:2", [("a", 2)]),
        (4, "a,b", [("a", 2), ("b", 2)]),
        (5, "a,b", [("a", 3), ("b", 2)]),
        (5, "a:1,b,c", [("a", 1), ("b", 2), ("c", 2)]),
        (1, "a:1,b", [("a", 1)]),
    ],
)
def test_ranks_are_divided(np: int, hosts: str, expected: list[tuple[str, int]]) -> None:
    assert assign(np, parse_hosts(hosts)) == tuple(Host(*pair) for pair in expected)


def test_without_hosts_all_ranks_are_here() -> None:
    assert assign(3, ()) == (Host("localhost", 3),)


def test_too_few_slots() -> None:
    with pytest.raises(LaunchError, match=r"-np 5 asks for more .* \(a:2, b:2: 4 in all\).*-np 4"):
        assign(5, parse_hosts("a:2,b:2"))
