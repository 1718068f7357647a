"""This host's network addresses, and TCP connections between the ranks of one job.

Both ends of a connection prove that they know the listening rank's token before either says anything else, so that
neither a stranger who finds the port nor another host that has the same address (each has its own 172.17.0.1 where
there are containers) is taken for a rank. The token itself is never sent. The data that follow are not encrypted.

A transfer waits in the kernel, in one call that has given up the interpreter lock: the bytes go to and from a tensor's
own memory, and cost whoever else computes in Python nothing until they have all arrived.
"""

from __future__ import annotations

import hmac
import math
import os
import platform
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
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


def interface_of(address: str) -> str:
    """Name the interface that has this address, loopback too; empty if none has."""
    return next((a.interface for a in _all() if str(a.ip.ip) == address), "")


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


# --- connections ------------------------------------------------------------------------------------------------------
TOKEN_BYTES = 32
NONCE_BYTES, PROOF_BYTES = 16, 32
CONNECT_S = 3.0  # how long an address may take to answer; a packet that is lost is sent again after 1 s
PROVE_S = 2.0  # how long who connects may take to prove itself
ANSWER_S = 10.0  # how long a rank that listens, and computes, may take to do so
UNPROVEN = 64  # connections that a listener keeps of those that have proven nothing yet
PAUSE_S = 0.5  # that each of them has at least; before a listener, or who was hung up on, tries again
ATTEMPTS = 4  # of who was hung up on


def listen(address: str = "") -> socket.socket:
    """Open a socket that listens on a free port of an address; of all if it is empty."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def accept(connection: socket.socket, token: bytes) -> bool:
    """Prove that the listener has the token; return True if the other end has it too. Raise OSError if that fails."""
    connection.settimeout(PROVE_S)
    own = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own)
    reply = _read(connection, NONCE_BYTES + PROOF_BYTES, PROVE_S)
    nonces = own + reply[:NONCE_BYTES]
    if not hmac.compare_digest(reply[NONCE_BYTES:], _proof(token, b"asks", nonces)):
        return False
    connection.sendall(_proof(token, b"answers", nonces))
    _whole_transfers(connection)
    return True


def connect(address: str, port: int, token: bytes, longest_s: float = math.inf) -> socket.socket | None:
    """Connect to the listener that has this token; None if another one answers, or who answers hangs up.

    Raise OSError if nobody does.
    """
    connection = socket.create_connection((address, port), timeout=min(CONNECT_S, longest_s))
    proven = False
    try:
        connection.settimeout(min(ANSWER_S, longest_s))
        own = secrets.token_bytes(NONCE_BYTES)
        nonces = _read(connection, NONCE_BYTES, ANSWER_S) + own
        connection.sendall(own + _proof(token, b"asks", nonces))
        proven = hmac.compare_digest(_read(connection, PROOF_BYTES, ANSWER_S), _proof(token, b"answers", nonces))
    except ConnectionError:
        pass
    finally:
        if not proven:
            connection.close()
    if not proven:
        return None
    _whole_transfers(connection)
    return connection


def set_deadline(connection: socket.socket, seconds: float) -> None:
    """Let a transfer without progress for so long raise BlockingIOError from now on."""
    whole, part = (0, 0) if math.isinf(seconds) else divmod(max(seconds, 1e-3), 1)  # 0: never
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(part * 1e6)))


def send(connection: socket.socket, header: bytes | memoryview, data: bytes | memoryview = b"") -> None:
    """Send the header and the data, completely."""
    sent = connection.sendmsg([header, data])
    if sent < len(header):
        connection.sendall(header[sent:])
    if sent < len(header) + len(data):
        connection.sendall(data[max(0, sent - len(header)) :])


def receive(connection: socket.socket, into: memoryview) -> None:
    """Receive as many bytes as `into` holds; raise ConnectionResetError if the other end has gone."""
    received = 0
    while received < len(into):
        n_bytes = connection.recv_into(into[received:], 0, socket.MSG_WAITALL)
        if n_bytes == 0:
            raise ConnectionResetError("the other end has closed the connection")
        received += n_bytes


def hang_up(connection: socket.socket) -> None:
    """Wake the thread that waits in a connection, and closes it: closed here, its number may be another's meanwhile."""
    with suppress(OSError):  # the other end was first
        connection.shutdown(socket.SHUT_RDWR)  # closing alone would wake nobody, and not count if a child has it too


def close(connection: socket.socket) -> None:
    """End a connection or a listener, and wake the thread that waits in it."""
    hang_up(connection)
    connection.close()


def _proof(token: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, role + nonces, "sha256")


def _read(connection: socket.socket, n_bytes: int, seconds: float) -> bytes:
    data, until = bytearray(n_bytes), time.monotonic() + seconds
    view = memoryview(data)
    while view and time.monotonic() < until:  # a byte now and then doesn't keep a thread busy for ever
        received = connection.recv_into(view)
        view = view[received or len(view) :]  # nothing more comes: what is missing proves nothing
    return bytes(data)


def _whole_transfers(connection: socket.socket) -> None:
    connection.settimeout(None)  # the deadline is the kernel's: Python's would poll before each part
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
