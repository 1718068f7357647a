"""TCP connections of one job: whole transfers, deadlines, strangers; and which addresses a host has."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from harness.cases import each
from hpcdist.comm import network
from hpcdist.errors import UnknownNameError

TOKEN = bytes(range(network.TOKEN_BYTES))


@contextmanager
def listening(token: bytes = TOKEN):
    """The port of a listener, and the list of what it accepted: connections, or why not."""
    accepted, listener = [], network.listen()

    def accept():
        connection, _ = listener.accept()
        try:
            accepted.append(connection if network.accept(connection, token) else "refused")
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
        network.close(listener)
        for connection in accepted:
            if isinstance(connection, socket.socket):
                network.close(connection)


@pytest.fixture
def pair():
    """Both ends of a proven connection."""
    with listening() as (port, accepted, thread):
        connection = network.connect("127.0.0.1", port, TOKEN)
        thread.join()
        yield connection, accepted[0]
        network.close(connection)


@each("n_bytes", [0, 1, 70_000, 20_000_000])
def test_transfers_arrive_whole(pair, n_bytes):
    near, far = pair
    data, into = bytes(range(256)) * (n_bytes // 256) + bytes(n_bytes % 256), bytearray(8 + n_bytes)
    sender = threading.Thread(target=network.send, args=[near, b"12345678", memoryview(data)])
    sender.start()
    network.receive(far, memoryview(into))
    sender.join()
    assert into[:8] == b"12345678" and into[8:] == data


def test_the_other_end_that_goes_away_is_noticed_in_the_midst_of_a_transfer(pair):
    near, far = pair
    network.send(far, b"123")
    network.close(far)
    with pytest.raises(ConnectionResetError, match="the other end has closed the connection"):
        network.receive(near, memoryview(bytearray(4)))


def test_a_transfer_that_stands_still_ends_at_its_deadline(pair):
    near, far = pair
    network.set_deadline(near, 0.2)
    start = time.perf_counter()
    with pytest.raises(BlockingIOError):
        network.receive(near, memoryview(bytearray(1)))
    with pytest.raises(BlockingIOError):
        network.send(near, b"1", memoryview(bytearray(40_000_000)))  # nobody receives it
    assert 0.3 < time.perf_counter() - start < 10
    network.set_deadline(near, float("inf"))
    network.send(far, b"2")
    network.receive(near, memoryview(bytearray(1)))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_listener_on_one_address_is_found_there_only(address):
    try:
        listener = network.listen(address)
    except OSError as error:
        pytest.skip(f"this machine has no {address}: {error}")
    with listener:
        assert listener.getsockname()[0] == address
        other = {"127.0.0.1": "127.0.0.2", "::1": "127.0.0.1"}[address]
        with pytest.raises(ConnectionRefusedError):
            network.connect(other, listener.getsockname()[1], TOKEN)


# --- strangers --------------------------------------------------------------------------------------------------------


def test_a_listener_or_an_asker_that_does_not_know_the_token_is_left():
    """An asker that would talk to whoever listens there has told it nothing that opens the real one."""
    with listening() as (port, accepted, thread):
        assert network.connect("127.0.0.1", port, TOKEN[::-1]) is None
        thread.join()
        assert accepted == ["refused"]
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer():
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(bytes(network.NONCE_BYTES))
                heard.extend(connection.recv(1000))
                connection.sendall(bytes(network.PROOF_BYTES))

        thread = threading.Thread(target=answer)
        thread.start()
        assert network.connect("127.0.0.1", impostor.getsockname()[1], TOKEN) is None
        thread.join()
    assert len(heard) == network.NONCE_BYTES + network.PROOF_BYTES and TOKEN not in heard
    with listening() as (port, accepted, thread), socket.create_connection(("127.0.0.1", port)) as replay:
        replay.sendall(heard)
        thread.join()
        assert accepted == ["refused"], "what was heard is no proof for another connection"


@each("says", [b"", b"GET / HTTP/1.0\r\n\r\n", bytes(1000)])
def test_a_stranger_who_says_anything_is_refused(says):
    with listening() as (port, accepted, thread), socket.create_connection(("127.0.0.1", port)) as stranger:
        with contextlib.suppress(OSError):  # it may have been refused, and the connection reset, by now
            stranger.sendall(says)
            stranger.shutdown(socket.SHUT_WR)
        thread.join()
        assert accepted == ["refused"] or isinstance(accepted[0], OSError)


def test_a_stranger_who_says_nothing_is_left_in_time(monkeypatch):
    monkeypatch.setattr(network, "PROVE_S", 0.2)
    with listening() as (port, accepted, thread), socket.create_connection(("127.0.0.1", port)):
        thread.join(10)
        assert isinstance(accepted[0], TimeoutError)


# --- addresses --------------------------------------------------------------------------------------------------------
def test_addresses_are_those_that_others_may_reach():
    for interface, ip in network.addresses():
        assert interface in {name for _, name in socket.if_nameindex()}
        assert not ip.is_loopback and not ip.is_link_local
        with socket.create_server((str(ip.ip), 0), family=socket.AF_INET6 if ip.version == 6 else socket.AF_INET):
            pass  # it is this host's own


def test_an_interface_or_a_network_may_be_chosen():
    known = network.addresses()
    for address in known:
        assert {a.interface for a in network.addresses(address.interface)} == {address.interface}
        assert address in network.addresses(str(address.ip.network))
    for chosen in ("ib77", "203.0.113.0/29"):
        with pytest.raises(UnknownNameError, match=f"interface or network of this host must be one of .*{chosen}"):
            network.addresses(chosen)


def test_addresses_on_a_common_network_come_first():
    own = [network.Address("ib0", network.ip_interface("10.3.0.7/16"))]
    theirs = ["192.168.1.9", "fd00::1", "10.3.200.1", "10.4.0.1"]
    assert network.shared_first(theirs, own) == ["10.3.200.1", "192.168.1.9", "fd00::1", "10.4.0.1"]
    assert network.stack_id() == network.stack_id() != ""
