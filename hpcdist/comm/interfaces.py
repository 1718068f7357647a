"""This host's network addresses, and which of another rank's to try first. Linux; elsewhere only loopback is known."""

from __future__ import annotations

import os
import platform
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Interface, IPv6Interface, ip_interface, ip_network
from pathlib import Path
from typing import NamedTuple

from hpcdist.errors import UnknownNameError

SIOCGIFFLAGS, SIOCGIFADDR, SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B  # linux/sockios.h
IS_UP = 0x1 | 0x40  # IFF_UP and IFF_RUNNING: a cable is in
LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """An address and its network, on the interface of that name."""

    interface: str
    ip: IPv4Interface | IPv6Interface


def addresses(chosen: str = "") -> list[Address]:
    """Addresses of this host that others may reach, those of the fastest interface first, then IPv4 before IPv6.

    Args:
        chosen: only those of this interface, or within this network, such as 10.1.0.0/16; all if empty.

    Raises:
        UnknownNameError: there is none.
    """
    found = [a for a in (*_ipv4(), *_ipv6()) if not (a.ip.is_loopback or a.ip.is_link_local)]
    found.sort(key=lambda a: (-speed_mbit_s(a.interface), a.ip.version))
    if not chosen:
        return found
    kept = [a for a in found if a.interface == chosen or _within(a, chosen)]
    if not kept:
        known = {name for a in found for name in (a.interface, str(a.ip.network))}
        raise UnknownNameError("interface or network of this host", chosen, known)
    return kept


def here() -> str:
    """What ranks have in common that reach each other by loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return platform.node()


def in_order(theirs: Iterable[str], own: Iterable[Address]) -> list[str]:
    """Their addresses, those on a network that is ours too first."""
    networks = [a.ip.network for a in own]
    return sorted(theirs, key=lambda ip: not any(ip_interface(ip).ip in network for network in networks))


def _ipv4() -> Iterable[Address]:
    try:
        from fcntl import ioctl
    except ImportError:  # Windows
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():

            def ask(what: int, request: bytes = struct.pack("256s", name.encode())) -> bytes:
                return ioctl(any_socket, what, request)[16:24]  # the union in struct ifreq

            try:
                if struct.unpack_from("H", ask(SIOCGIFFLAGS))[0] & IS_UP == IS_UP:
                    ip, mask = (socket.inet_ntoa(ask(what)[4:]) for what in (SIOCGIFADDR, SIOCGIFNETMASK))
                    yield Address(name, ip_interface(f"{ip}/{mask}"))
            except OSError:
                pass  # has no IPv4 address


def _ipv6() -> Iterable[Address]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return
    for digits, _, prefix, _, _, name in map(str.split, lines):
        yield Address(name, IPv6Interface((int(digits, 16), int(prefix, 16))))


def speed_mbit_s(interface: str) -> int:
    """Megabits per second; 0 where the driver doesn't tell."""
    try:
        return max(0, int(Path(f"/sys/class/net/{interface}/speed").read_text()))
    except (OSError, ValueError):
        return 0


def _within(address: Address, network: str) -> bool:
    try:
        return address.ip.ip in ip_network(network)
    except ValueError:  # the name of an interface
        return False
