"""This host's network addresses, and TCP connections between the ranks of one job.

Both ends of a connection first prove that they know the listening rank's token. So neither a stranger who finds the
port nor another host with the same address (containers give many hosts the address 172.17.0.1) is mistaken for a rank.
The token itself is never sent. The data that follow are not encrypted.

A transfer waits in the kernel, in one call without the interpreter lock: bytes go directly to and from a tensor's
memory, and other Python threads run until all have arrived.
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
    """An IP address with its network, and the name of its interface."""

    interface: str
    ip: IPv4Interface | IPv6Interface


def addresses(chosen: str = "") -> list[Address]:
    """List the addresses of this host that other hosts may reach: fastest interface first, IPv4 before IPv6.

    Args:
        chosen: name of an interface, or a network such as 10.1.0.0/16, to restrict the list; empty: all interfaces.

    Raises:
        UnknownNameError: this host has no such interface or network.
    """
    reachable = [a for a in _host_addresses() if not (a.ip.is_loopback or a.ip.is_link_local)]
    reachable.sort(key=lambda a: (-speed_mbit_s(a.interface), a.ip.version))
    if not chosen:
        return reachable
    kept = [a for a in reachable if a.interface == chosen or _within(a, chosen)]
    if not kept:
        known = {name for a in reachable for name in (a.interface, str(a.ip.network))}
        raise UnknownNameError("interface or network of this host", chosen, known)
    return kept


def interface_of(address: str) -> str:
    """Return the name of the interface with this address, loopback included; empty if there is none."""
    return next((a.interface for a in _host_addresses() if str(a.ip.ip) == address), "")


def stack_id() -> str:
    """Return an identifier of this network stack; processes with equal identifiers reach each other by loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return platform.node()


def shared_first(remote: Iterable[str], local: Iterable[Address]) -> list[str]:
    """Sort another host's addresses: addresses on a network that this host is also on come first."""
    networks = [a.ip.network for a in local]
    return sorted(remote, key=lambda ip: not any(ip_interface(ip).ip in network for network in networks))


def _host_addresses() -> Iterator[Address]:
    """List the addresses of all interfaces that are up."""
    states = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in FAMILIES and entry.netmask and name in states and states[name].isup:
                prefix = int(ip_address(entry.netmask)).bit_count()
                yield Address(name, ip_interface(f"{entry.address.partition('%')[0]}/{prefix}"))


def speed_mbit_s(interface: str) -> int:
    """Return an interface's speed in megabits per second; 0 if the driver doesn't report it."""
    stats = psutil.net_if_stats().get(interface)
    return stats.speed if stats else 0


def _within(address: Address, network: str) -> bool:
    """Return whether an address is in a network; False if `network` is the name of an interface."""
    try:
        return address.ip.ip in ip_network(network)
    except ValueError:
        return False


# --- connections ------------------------------------------------------------------------------------------------------
TOKEN_BYTES = 32
NONCE_BYTES, PROOF_BYTES = 16, 32
CONNECT_S = 3.0  # limit to connect to one address; a lost packet is sent again after 1 s
PROVE_S = 2.0  # limit for the connecting side's proof
ANSWER_S = 10.0  # limit for the listening side's proof: that rank may be computing
UNPROVEN = 64  # a listener keeps at most this many connections without proof
PAUSE_S = 0.5  # minimum life of such a connection; pause before a listener, or a rejected rank, tries again
ATTEMPTS = 4  # of a rejected rank


def listen(address: str = "") -> socket.socket:
    """Open a socket that listens on a free port of `address`; of all addresses if empty."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def accept(connection: socket.socket, token: bytes) -> bool:
    """Exchange proofs of the token as the listener; return whether the other end has it. Raise OSError on failure."""
    connection.settimeout(PROVE_S)
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce)
    reply = _read(connection, NONCE_BYTES + PROOF_BYTES, PROVE_S)
    nonces = nonce + reply[:NONCE_BYTES]
    if not hmac.compare_digest(reply[NONCE_BYTES:], _proof(token, b"asks", nonces)):
        return False
    connection.sendall(_proof(token, b"answers", nonces))
    _use_blocking_transfers(connection)
    return True


def connect(address: str, port: int, token: bytes, longest_s: float = math.inf) -> socket.socket | None:
    """Connect to a listener and exchange proofs of the token; None if it lacks the token or closes the connection.

    Raises OSError if the address does not accept connections.
    """
    connection = socket.create_connection((address, port), timeout=min(CONNECT_S, longest_s))
    proven = False
    try:
        connection.settimeout(min(ANSWER_S, longest_s))
        nonce = secrets.token_bytes(NONCE_BYTES)
        nonces = _read(connection, NONCE_BYTES, ANSWER_S) + nonce
        connection.sendall(nonce + _proof(token, b"asks", nonces))
        proven = hmac.compare_digest(_read(connection, PROOF_BYTES, ANSWER_S), _proof(token, b"answers", nonces))
    except ConnectionError:
        pass
    finally:
        if not proven:
            connection.close()
    if not proven:
        return None
    _use_blocking_transfers(connection)
    return connection


def set_deadline(connection: socket.socket, seconds: float) -> None:
    """Let transfers raise BlockingIOError after `seconds` without progress."""
    whole, part = (0, 0) if math.isinf(seconds) else divmod(max(seconds, 1e-3), 1)  # 0: never
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(part * 1e6)))


def send(connection: socket.socket, header: bytes | memoryview, data: bytes | memoryview = b"") -> None:
    """Send all of the header and the data."""
    sent = connection.sendmsg([header, data])
    if sent < len(header):
        connection.sendall(header[sent:])
    if sent < len(header) + len(data):
        connection.sendall(data[max(0, sent - len(header)) :])


def receive(connection: socket.socket, into: memoryview) -> None:
    """Receive len(into) bytes; raise ConnectionResetError if the other end has closed the connection."""
    received = 0
    while received < len(into):
        n_bytes = connection.recv_into(into[received:], 0, socket.MSG_WAITALL)
        if n_bytes == 0:
            raise ConnectionResetError("the other end has closed the connection")
        received += n_bytes


def wake_and_end(connection: socket.socket) -> None:
    """Wake the thread that waits in a connection; that thread closes it, so the descriptor is not reused too early."""
    with suppress(OSError):  # the other end has closed it
        connection.shutdown(socket.SHUT_RDWR)  # close() would not wake the thread, nor act if a child process shares it


def close(connection: socket.socket) -> None:
    """End a connection or a listener, and wake the thread that waits in it."""
    wake_and_end(connection)
    connection.close()


def _proof(token: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, role + nonces, "sha256")


def _read(connection: socket.socket, n_bytes: int, seconds: float) -> bytes:
    """Receive `n_bytes`; the rest is zeros, which prove nothing, at the end of the stream or after `seconds`."""
    data, until = bytearray(n_bytes), time.monotonic() + seconds
    view = memoryview(data)
    while view and time.monotonic() < until:  # a slow sender must not keep the thread busy forever
        received = connection.recv_into(view)
        view = view[received or len(view) :]  # 0 bytes: the end of the stream
    return bytes(data)


def _use_blocking_transfers(connection: socket.socket) -> None:
    connection.settimeout(None)  # the kernel keeps the deadline: Python's would poll before each part
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
