"""TCP connections of one job: whole transfers, deadlines, strangers; and which addresses a host has."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from hpcdist.comm.network import interfaces, tcp
from hpcdist.errors import UnknownNameError

TOKEN = bytes(range(tcp.TOKEN_BYTES))


@contextmanager
def listening(token: bytes = TOKEN):
    """The port of a listener, and the list of what it accepted: connections, or why not."""
    accepted, listener = [], tcp.listen()

    def accept():
        connection, _ = listener.accept()
        try:
            accepted.append(connection if tcp.accept(connection, token) else "refused")
        except OSError as error:
            accepted.append(error)
        if accepted[-1] is not connection:
            connection.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1], accepted, thread
    finally:
        thread.join(20)
        tcp.close(listener)
        for connection in accepted:
            if isinstance(connection, socket.socket):
                tcp.close(connection)


@pytest.fixture
def pair():
    """Both ends of a proven connection."""
    with listening() as (port, accepted, thread):
        connection = tcp.connect("127.0.0.1", port, TOKEN)
        thread.join()
        yield connection, accepted[0]
        tcp.close(connection)


@pytest.mark.parametrize("n_bytes", [0, 1, 48, 70_000, 40_000_000])
def test_transfers_arrive_whole(pair, n_bytes):
    near, far = pair
    data, into = bytes(range(256)) * (n_bytes // 256) + bytes(n_bytes % 256), bytearray(8 + n_bytes)
    sender = threading.Thread(target=tcp.send, args=[near, b"12345678", memoryview(data)])
    sender.start()
    tcp.receive(far, memoryview(into))
    sender.join()
    assert into[:8] == b"12345678" and into[8:] == data


def test_the_other_end_that_goes_away_is_noticed_in_the_midst_of_a_transfer(pair):
    near, far = pair
    tcp.send(far, b"123")
    tcp.close(far)
    with pytest.raises(ConnectionResetError, match="the other end has closed the connection"):
        tcp.receive(near, memoryview(bytearray(4)))


def test_a_transfer_that_stands_still_ends_at_its_deadline(pair):
    near, far = pair
    tcp.set_deadline(near, 0.2)
    start = time.perf_counter()
    with pytest.raises(BlockingIOError):
        tcp.receive(near, memoryview(bytearray(1)))
    with pytest.raises(BlockingIOError):
        tcp.send(near, b"1", memoryview(bytearray(40_000_000)))  # nobody receives it
    assert 0.3 < time.perf_counter() - start < 10
    tcp.set_deadline(near, float("inf"))
    tcp.send(far, b"2")
    tcp.receive(near, memoryview(bytearray(1)))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_listener_on_one_address_is_found_there_only(address):
    try:
        listener = tcp.listen(address)
    except OSError as error:
        pytest.skip(f"this machine has no {address}: {error}")
    with listener:
        assert listener.getsockname()[0] == address
        other = {"127.0.0.1": "127.0.0.2", "::1": "127.0.0.1"}[address]
        with pytest.raises(ConnectionRefusedError):
            tcp.connect(other, listener.getsockname()[1], TOKEN)


# --- strangers --------------------------------------------------------------------------------------------------------
def test_who_does_not_know_the_token_is_refused():
    with listening() as (port, accepted, thread):
        assert tcp.connect("127.0.0.1", port, TOKEN[::-1]) is None
        thread.join()
        assert accepted == ["refused"]


def test_a_listener_that_does_not_know_the_token_is_left():
    """An asker that would talk to whoever listens there has told it nothing that opens the real one."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer():
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(bytes(tcp.NONCE_BYTES))
                heard.extend(connection.recv(1000))
                connection.sendall(bytes(tcp.PROOF_BYTES))

        thread = threading.Thread(target=answer)
        thread.start()
        assert tcp.connect("127.0.0.1", impostor.getsockname()[1], TOKEN) is None
        thread.join()
    assert len(heard) == tcp.NONCE_BYTES + tcp.PROOF_BYTES and TOKEN not in heard
    with listening() as (port, accepted, thread), socket.create_connection(("127.0.0.1", port)) as replay:
        replay.sendall(heard)
        thread.join()
        assert accepted == ["refused"], "what was heard is no proof for another connection"


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.0\r\n\r\n", bytes(1000)])
def test_a_stranger_who_says_anything_is_refused(says):
    with listening() as (port, accepted, thread), socket.create_connection(("127.0.0.1", port)) as stranger:
        with contextlib.suppress(OSError):  # it may have been refused, and the connection reset, by now
            stranger.sendall(says)
            stranger.shutdown(socket.SHUT_WR)
        thread.join()
        assert accepted == ["refused"] or isinstance(accepted[0], OSError)


def test_a_stranger_who_says_nothing_is_left_in_time(monkeypatch):
    monkeypatch.setattr(tcp, "PROVE_S", 0.2)
    with listening() as (port, accepted, thread), socket.create_connection(("127.0.0.1", port)):
        thread.join(10)
        assert isinstance(accepted[0], TimeoutError)


# --- addresses --------------------------------------------------------------------------------------------------------
def test_addresses_are_those_that_others_may_reach():
    for interface, ip in interfaces.addresses():
        assert interface in {name for _, name in socket.if_nameindex()}
        assert not ip.is_loopback and not ip.is_link_local
        with socket.create_server((str(ip.ip), 0), family=socket.AF_INET6 if ip.version == 6 else socket.AF_INET):
            pass  # it is this host's own


def test_an_interface_or_a_network_may_be_chosen():
    known = interfaces.addresses()
    for address in known:
        assert {a.interface for a in interfaces.addresses(address.interface)} == {address.interface}
        assert address in interfaces.addresses(str(address.ip.network))
    for chosen in ("ib77", "203.0.113.0/29"):
        with pytest.raises(UnknownNameError, match=f"interface or network of this host must be one of .*{chosen}"):
            interfaces.addresses(chosen)


def test_addresses_on_a_common_network_come_first():
    own = [interfaces.Address("ib0", interfaces.ip_interface("10.3.0.7/16"))]
    theirs = ["192.168.1.9", "fd00::1", "10.3.200.1", "10.4.0.1"]
    assert interfaces.in_order(theirs, own) == ["10.3.200.1", "192.168.1.9", "fd00::1", "10.4.0.1"]
    assert interfaces.here() == interfaces.here() != ""
