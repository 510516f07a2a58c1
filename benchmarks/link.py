"""Two hosts on this machine, joined by a link of a known rate whose bytes are counted by the interfaces themselves."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.launch.two_hosts import TwoHosts, missing, two_hosts

RATE = "1gbit"
BURST = "256kb"
"""What may pass at once: TCP hands the link pieces of up to 64 KB."""
QUEUE = "50ms"
DEVICE = "eth0"
COMMAND_SECONDS = 30


@dataclass(frozen=True)
class Link:
    """The link between the hosts of a pair."""

    pair: TwoHosts

    def sent(self) -> list[int]:
        """Return the bytes that each host has sent so far."""
        return [self._sent(namespace) for namespace in self.pair.namespaces.values()]

    def _sent(self, namespace: str) -> int:
        [shown] = json.loads(_do("ip", "-n", namespace, "-s", "-j", "link", "show", "dev", DEVICE))
        return int(shown["stats64"]["tx"]["bytes"])


def absent() -> str | None:
    """Return what this machine lacks for two hosts, None if nothing."""
    if shutil.which("tc", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        return "not installed: tc (Debian: iproute2)"
    return missing()


@contextlib.contextmanager
def limited_link(folder: Path) -> Iterator[Link]:
    """Make two hosts whose interfaces are called eth0 and send at most RATE."""
    with two_hosts(folder) as pair:
        for namespace in pair.namespaces.values():
            # One name on both: horovodrun uses the interfaces whose names all hosts have.
            device = _device(namespace)
            _do("ip", "-n", namespace, "link", "set", device, "down")
            _do("ip", "-n", namespace, "link", "set", device, "name", DEVICE)
            _do("ip", "-n", namespace, "link", "set", DEVICE, "up")
            _do("tc", "-n", namespace, "qdisc", "add", "dev", DEVICE, "root", "tbf",
                "rate", RATE, "burst", BURST, "latency", QUEUE)  # fmt: skip
        yield Link(pair)


def _device(namespace: str) -> str:
    shown = json.loads(_do("ip", "-n", namespace, "-j", "link", "show"))
    [name] = [link["ifname"] for link in shown if link["ifname"] != "lo" and link.get("link_type") == "ether"]
    return str(name)


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
