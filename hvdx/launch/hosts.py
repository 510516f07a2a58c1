"""Where the processes go: reads `-H` and host files, and divides the ranks; pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hvdx.errors import LaunchError

_NAME = re.compile(r"[A-Za-z0-9_.\-]+|\[[0-9A-Fa-f:.]+\]")
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class Host:
    """A host and how many ranks it takes; `slots` is None where the user gave no number."""

    name: str
    slots: int | None


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read `-H a:2,b:2`.

    Raises:
        LaunchError: says what was understood and what to write.
    """
    shape = "Write hosts with commas and no spaces, such as -H a:2,b:2."
    if not text.strip():
        raise LaunchError(f"-H got no host. {shape}")
    words = text.split()
    if len(words) > 1:
        better = ",".join(part for word in words for part in word.split(",") if part)
        raise LaunchError(f"-H {text!r} separates hosts by spaces. Write -H {better}")
    parts = text.split(",")
    if not all(parts):
        raise LaunchError(f"-H {text!r} has an empty place between its commas (or a space after one). {shape}")
    return _distinct([_parse_host(part, f"-H {text!r}") for part in parts], f"-H {text!r}")


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Read a host file: a host a line as `name slots=N`, `name:N` or `name`; `#` starts a comment.

    Raises:
        LaunchError: names file, line and what to write.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split("#", 1)[0].split()
        if not fields:
            continue
        where = f"line {number} of {path} ({line.strip()!r})"
        if len(fields) == 1:
            hosts.append(_parse_host(fields[0], where))
        elif len(fields) == 2 and (match := re.fullmatch(r"(?:max_)?slots=(.*)", fields[1])):
            hosts.append(Host(_name(fields[0], where), _slots(match[1], where)))
        else:
            raise LaunchError(f"{where} is not understood. Write a host a line, such as: a slots=2")
    if not hosts:
        raise LaunchError(f"The host file {path} names no host. Write a host a line, such as: a slots=2")
    return _distinct(hosts, path)


def assign(np: int, hosts: Sequence[Host], servers: int = 0) -> tuple[Host, ...]:
    """Give each host its processes, in order: full slots first; hosts without a number share what is left.

    Args:
        np: number of ranks, or of workers.
        hosts: the hosts with their slots.
        servers: number of servers, which need slots as well.

    Raises:
        LaunchError: the slots do not suffice.
    """
    total = np + servers
    if not hosts:
        return (Host("localhost", total),)
    numbered = sum(host.slots for host in hosts if host.slots is not None)
    open_hosts = sum(host.slots is None for host in hosts)
    if numbered < total and not open_hosts:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        asked = f"-np {np} asks for more ranks"
        if servers:
            asked = f"-np {np} --servers {servers} asks for more processes"
        fewer = f", or write -np {numbered - servers}" if numbered > servers else ""
        raise LaunchError(
            f"{asked} than the hosts have slots ({listed}: {numbered} in all). "
            f"Raise the numbers behind the colons, name more hosts{fewer}."
        )
    shared = max(0, total - numbered)
    left, result = total, []
    for host in hosts:
        if host.slots is None:
            part = -(-shared // open_hosts)
            shared, open_hosts = shared - part, open_hosts - 1
        else:
            part = host.slots
        part = min(part, left)
        left -= part
        if part:
            result.append(Host(host.name, part))
    return tuple(result)


def _parse_host(text: str, where: str) -> Host:
    name, colon, slots = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        return Host(_name(text, where), None)
    return Host(_name(name, where), _slots(slots, where))


def _name(text: str, where: str) -> str:
    if not _NAME.fullmatch(text) or text.startswith("-"):
        raise LaunchError(f"{where}: {text!r} is no host name. Write hosts such as -H a:2,b:2.")
    return text


def _slots(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise LaunchError(
            f"{where}: {text!r} is no number of slots. Write how many ranks the host takes, 1 or more, such as a:2."
        )
    return int(text)


def _distinct(hosts: list[Host], where: str) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise LaunchError(
                f"{where} names the host {name} twice. Write it once with all its slots, such as {name}:4."
            )
    return tuple(hosts)
