"""This host's network addresses, and the order in which to try another rank's."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_interface, ip_network
from pathlib import Path
from typing import NamedTuple

import psutil

from hpcdist.errors import UnknownNameError

FAMILIES = (socket.AF_INET, socket.AF_INET6)
LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """An address and its network, on the interface of that name."""

    interface: str
    ip: IPv4Interface | IPv6Interface


def addresses(chosen: str = "") -> list[Address]:
    """List the addresses of this host that others may reach, those of the fastest interface first, IPv4 before IPv6.

    Args:
        chosen: only those of this interface, or within this network, such as 10.1.0.0/16; all if empty.

    Raises:
        UnknownNameError: there is none.
    """
    reachable = [a for a in _all() if not (a.ip.is_loopback or a.ip.is_link_local)]
    reachable.sort(key=lambda a: (-speed_mbit_s(a.interface), a.ip.version))
    if not chosen:
        return reachable
    kept = [a for a in reachable if a.interface == chosen or _within(a, chosen)]
    if not kept:
        known = {name for a in reachable for name in (a.interface, str(a.ip.network))}
        raise UnknownNameError("interface or network of this host", chosen, known)
    return kept


def here() -> str:
    """Name the network stack, which is the same for ranks that reach each other by loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return platform.node()


def in_order(theirs: Iterable[str], own: Iterable[Address]) -> list[str]:
    """Sort another host's addresses, those on a network that this host is on first."""
    networks = [a.ip.network for a in own]
    return sorted(theirs, key=lambda ip: not any(ip_interface(ip).ip in network for network in networks))


def _all() -> Iterator[Address]:
    """List the addresses of every interface that is up and has a cable in."""
    states = psutil.net_if_stats()
    for name, theirs in psutil.net_if_addrs().items():
        for one in theirs:
            if one.family in FAMILIES and one.netmask and name in states and states[name].isup:
                prefix = int(ip_address(one.netmask)).bit_count()
                yield Address(name, ip_interface(f"{one.address.partition('%')[0]}/{prefix}"))


def speed_mbit_s(interface: str) -> int:
    """Read an interface's megabits per second; 0 where the driver doesn't report them."""
    stats = psutil.net_if_stats().get(interface)
    return stats.speed if stats else 0


def _within(address: Address, network: str) -> bool:
    try:
        return address.ip.ip in ip_network(network)
    except ValueError:  # the name of an interface
        return False
