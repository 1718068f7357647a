"""Where ranks meet that know each other by MPI, and are to talk by TCP as well: for libraries that want an address."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import TCPStore

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.interfaces import LOOPBACK, addresses, here, in_order
from hpcdist.errors import CommunicationError

CONNECT_S = 5.0  # for one attempt to reach rank 0 at one of its addresses
STORE_S = 300.0


class Meeting(NamedTuple):
    """The store that rank 0 keeps, and the address by which this rank is on the network of the others."""

    store: TCPStore
    address: str


def meet(comm: Communicator, interface: str = "") -> Meeting:
    """Collective. torch.distributed's store, at a free port of rank 0, which tells its addresses over MPI.

    Loopback is used where all ranks share a network stack, and nowhere else.

    Args:
        interface: name of a network interface, or a network such as 10.1.0.0/16; by default the fastest one.

    Raises:
        CommunicationError: a rank reaches none of rank 0's addresses.
        UnknownNameError: a host has no such interface or network.
    """
    timeout = timedelta(seconds=STORE_S)
    store, port = None, 0
    if comm.rank == 0:
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timeout)  # listens everywhere
        port = store.port
    told = [data.decode().split("\n") for data in comm.exchange(f"{here()}\n{port}".encode())]
    port = int(told[0][1])
    if all(where == told[0][0] for where, _ in told):
        return Meeting(store or TCPStore(LOOPBACK, port, is_master=False, timeout=timeout), LOOPBACK)
    own = addresses(interface)
    theirs = comm.exchange(" ".join(str(a.ip.ip) for a in own).encode())[0].decode().split()
    found = (_reach(in_order(theirs, own), port) if comm.rank > 0 else None) or ("", "")
    reached = [data.decode() for data in comm.exchange(found[0].encode())]
    for rank, host in enumerate(reached[1:], 1):
        if not host:
            raise CommunicationError(
                f"rank 0 must be reached by all ranks over TCP; rank {rank} got no answer from port {port} at "
                f"{', '.join(theirs) or 'any address, as rank 0 has none but loopback'}. Name the network that they "
                "share: interface = 'ib0'."
            )
    if comm.rank > 0:
        store = TCPStore(found[0], port, is_master=False, timeout=timeout)
    return Meeting(store, found[1] if comm.rank > 0 else reached[1])


def _reach(hosts: list[str], port: int) -> tuple[str, str] | None:
    """The first of these addresses that answers, and one's own towards it."""
    for host in hosts:
        try:
            with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
                return host, connection.getsockname()[0]
        except OSError:
            pass  # another one may be on a network that both share
    return None
