"""Two hosts on this machine: network namespaces joined by a veth pair, each with its own host name and a real sshd."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PORT = 2222
NETWORK = "10.77.1.0/24"
ADDRESSES = {"hosta": "10.77.1.1", "hostb": "10.77.1.2"}
_SEARCH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def missing() -> str | None:
    """Return what this machine lacks for two hosts, None if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "unshare", "ssh", "sshd", "ssh-keygen") if not shutil.which(name, path=_SEARCH)]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: iproute2, util-linux, openssh-client, openssh-server)"
    probe = f"hvdx-probe-{uuid.uuid4().hex[:8]}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this kernel or container allows no network namespaces"
    _do("ip", "netns", "del", probe)
    return None


@dataclass(frozen=True)
class TwoHosts:
    """The namespaces of hosta and hostb, and the key that opens both."""

    namespaces: dict[str, str]
    key: str

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host."""
        enter = ["ip", "netns", "exec", self.namespaces[host], "unshare", "--uts", "sh", "-c"]
        return [*enter, f'hostname {host}; exec "$@"', "sh", *command]


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make the two hosts and remove all of them again, also when making them fails half way."""
    unique = uuid.uuid4().hex[:8]
    hosts = TwoHosts({host: f"hvdx-{unique}-{host}" for host in ADDRESSES}, str(folder / "key"))
    with contextlib.ExitStack() as stack:
        for name in hosts.namespaces.values():
            _do("ip", "netns", "add", name)
            stack.callback(_do, "ip", "netns", "del", name)
        # Made inside the namespaces, the pair ends with them.
        first, second = hosts.namespaces.values()
        _do("ip", "link", "add", f"va{unique}", "netns", first, "type", "veth", "peer", f"vb{unique}", "netns", second)
        _make_keys(folder)
        public = " ".join((folder / "hostkey.pub").read_text().split()[:2])
        for (host, name), link in zip(hosts.namespaces.items(), (f"va{unique}", f"vb{unique}"), strict=True):
            _do("ip", "-n", name, "addr", "add", f"{ADDRESSES[host]}/24", "dev", link)
            _do("ip", "-n", name, "link", "set", link, "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            # `ip netns exec` lays these files over those in /etc.
            etc = Path("/etc/netns") / name
            stack.callback(_remove, etc)
            (etc / "ssh").mkdir(parents=True)
            names = "".join(f"{address} {other}\n" for other, address in ADDRESSES.items())
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            (etc / "ssh" / "ssh_known_hosts").write_text("".join(f"[{other}]:{PORT} {public}\n" for other in ADDRESSES))
            stack.enter_context(_sshd(hosts, host, folder))
        yield hosts


def _make_keys(folder: Path) -> None:
    for name in ("key", "hostkey"):
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))


@contextlib.contextmanager
def _sshd(hosts: TwoHosts, host: str, folder: Path) -> Iterator[None]:
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "Port": PORT, "ListenAddress": ADDRESSES[host], "HostKey": folder / "hostkey", "PidFile": "none",
        "UsePAM": "no", "AuthorizedKeysFile": folder / "key.pub", "StrictModes": "no", "PermitRootLogin": "yes",
    }  # fmt: skip
    line = [str(shutil.which("sshd", path=_SEARCH)), "-D", "-e", "-f", "/dev/null"]
    line += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    with (folder / f"sshd.{host}.log").open("w") as log:
        process = subprocess.Popen(hosts.on(host, line), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _wait_for_port(hosts, host, folder)
        yield
    finally:
        process.terminate()
        process.wait(10)


def _wait_for_port(hosts: TwoHosts, host: str, folder: Path) -> None:
    end = time.monotonic() + 10
    log = folder / f"sshd.{host}.log"
    while "Server listening" not in log.read_text():
        if time.monotonic() > end:
            raise TimeoutError(f"sshd of {host} on {socket.gethostname()} did not start: {log.read_text()}")
        time.sleep(0.05)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
