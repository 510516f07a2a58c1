"""Under which address each rank reaches the others: the loopback on one host, else a network that all hosts are on."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B


@dataclass(frozen=True)
class Contact:
    """What a rank tells of itself.

    Args:
        host: the name of its host; ranks of equal names share a host.
        interfaces: its IPv4 addresses with prefix length ("10.0.0.1/24"), in the order of the interfaces.
        ports: TCP ports on which it listens.
    """

    host: str
    interfaces: tuple[str, ...]
    ports: tuple[int, ...]

    def pack(self) -> bytes:
        """Return the contact as bytes."""
        return json.dumps([self.host, self.interfaces, self.ports]).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> Contact:
        """Return the contact that `pack` made bytes of."""
        host, interfaces, ports = json.loads(raw)
        return cls(host, tuple(interfaces), tuple(ports))


def contact(*ports: int) -> Contact:
    """Return this process's contact."""
    return Contact(socket.gethostname(), tuple(_interfaces()), ports)


def reachable(contacts: Sequence[Contact]) -> list[str]:
    """Return an address of each rank at which all others reach it.

    On several hosts that is an address in a network on which every host has one of its own; where there is no such
    network it is the host's name.
    """
    if len({c.host for c in contacts}) == 1:
        return [LOOPBACK] * len(contacts)
    for text in contacts[0].interfaces:
        network = ipaddress.IPv4Interface(text).network
        found = [_address_in(network, c) for c in contacts]
        owners = {address: c.host for address, c in zip(found, contacts, strict=True)}
        # a bridge that each host has for itself (172.17.0.1) looks like one network, with one address for all
        if all(found) and all(owners[a] == c.host for a, c in zip(found, contacts, strict=True)):
            return [str(address) for address in found]
    return [c.host for c in contacts]


def free_port() -> int:
    """Return a TCP port that nobody uses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _address_in(network: ipaddress.IPv4Network, of: Contact) -> str | None:
    for text in of.interfaces:
        interface = ipaddress.IPv4Interface(text)
        if interface.ip in network:
            return str(interface.ip)
    return None


def _interfaces() -> list[str]:
    result = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                address = socket.inet_ntoa(fcntl.ioctl(handle, _SIOCGIFADDR, request)[20:24])
                mask = socket.inet_ntoa(fcntl.ioctl(handle, _SIOCGIFNETMASK, request)[20:24])
                interface = ipaddress.IPv4Interface(f"{address}/{mask}")
                if not interface.is_loopback:
                    result.append(str(interface))
    return result
