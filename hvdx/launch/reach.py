"""Whether the other hosts can be reached, asked of all of them at once before MPI's launcher tries."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hvdx.errors import LaunchError
from hvdx.launch import probe
from hvdx.launch.hosts import LOCAL_NAMES, Host

_CONNECT = 10


def ssh_arguments(port: int | None, identity: str | None) -> tuple[str, ...]:
    """Return ssh's arguments: no questions (nobody could answer them), a limit for the connection."""
    line = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}"]
    if port is not None:
        line += ["-p", str(port)]
    if identity is not None:
        line += ["-i", identity]
    return tuple(line)


def is_local(name: str) -> bool:
    """Return whether a host name means this machine."""
    own = socket.gethostname()
    if name in LOCAL_NAMES or name in (own, own.split(".", 1)[0]):
        return True
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return any(_own_address(str(address)) for address in addresses)


def _own_address(address: str) -> bool:
    # Only an address of this machine can be bound to.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.bind((address, 0))
    except OSError:
        return False
    return True


def check(hosts: Sequence[Host], python: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Check that each host answers by ssh and has this Python at the same path.

    Raises:
        LaunchError: names the host, ssh's own words, and the command to try.
    """
    names = [host.name for host in hosts if not is_local(host.name)]
    with ThreadPoolExecutor(max_workers=32) as pool:
        for sentence in pool.map(lambda name: _problem(name, python, arguments, environ), names):
            if sentence:
                raise LaunchError(sentence)


def _problem(name: str, python: str, arguments: Sequence[str], environ: Mapping[str, str]) -> str | None:
    test = ["ssh", *arguments, name, f"test -x {shlex.quote(python)} && echo hvdx-found || echo hvdx-absent"]
    code, output, errors = probe.run(test, environ, limit=2.0 * _CONNECT)
    if code == 0 and "hvdx-found" in output:
        return None
    if code == 0:
        return (
            f"Host {name} has no {python}. Install the same environment at the same path there "
            f"(or share the file system), as on {os.uname().nodename}."
        )
    words = (errors.strip() or output.strip() or "ssh gave no reason").splitlines()[-1].strip().rstrip(".")
    attempt = shlex.join([*test[:-1], "true"])
    return f"Host {name} cannot be reached by ssh: {words}. This must work without a question: {attempt}"
