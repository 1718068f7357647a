"""TCP connections between the ranks of one job: whole transfers, deadlines, and proof of belonging.

Both ends prove that they know the listening rank's token before either says anything else, so that neither a stranger
who finds the port nor another host that has the same address (each has its own 172.17.0.1 where there are containers)
is taken for a rank. The token itself is never sent. The data that follow are not encrypted.

A transfer waits in the kernel, in one call that has given up the interpreter lock: the bytes go to and from a tensor's
own memory, and cost whoever else computes in Python nothing until they have all arrived.
"""

from __future__ import annotations

import hmac
import math
import secrets
import socket
import struct
import time

TOKEN_BYTES = 32
NONCE_BYTES, PROOF_BYTES = 16, 32
CONNECT_S = 3.0  # how long an address may take to answer; a packet that is lost is sent again after 1 s
PROVE_S = 10.0  # how long the other end may take to prove itself


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
    reply = _read(connection, NONCE_BYTES + PROOF_BYTES)
    nonces = own + reply[:NONCE_BYTES]
    if not hmac.compare_digest(reply[NONCE_BYTES:], _proof(token, b"asks", nonces)):
        return False
    connection.sendall(_proof(token, b"answers", nonces))
    _whole_transfers(connection)
    return True


def connect(address: str, port: int, token: bytes, longest_s: float = math.inf) -> socket.socket | None:
    """Connect to the listener that has this token; None if another one answers. Raise OSError if none does."""
    connection = socket.create_connection((address, port), timeout=min(CONNECT_S, longest_s))
    proven = False
    try:
        connection.settimeout(min(PROVE_S, longest_s))
        own = secrets.token_bytes(NONCE_BYTES)
        nonces = _read(connection, NONCE_BYTES) + own
        connection.sendall(own + _proof(token, b"asks", nonces))
        proven = hmac.compare_digest(_read(connection, PROOF_BYTES), _proof(token, b"answers", nonces))
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


def send(connection: socket.socket, header: bytes, data: memoryview | bytes = b"") -> None:
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


def close(connection: socket.socket) -> None:
    """End a connection or a listener, and wake the thread that waits in it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)  # closing alone would wake nobody, and not count if a child has it too
    except OSError:
        pass  # the other end was first
    connection.close()


def _proof(token: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, role + nonces, "sha256")


def _read(connection: socket.socket, n_bytes: int) -> bytes:
    data, until = bytearray(n_bytes), time.monotonic() + PROVE_S
    view = memoryview(data)
    while view and time.monotonic() < until:  # a byte now and then doesn't keep a thread busy for ever
        received = connection.recv_into(view)
        view = view[received or len(view) :]  # nothing more comes: what is missing proves nothing
    return bytes(data)


def _whole_transfers(connection: socket.socket) -> None:
    connection.settimeout(None)  # the deadline is the kernel's: Python's would poll before each part
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
