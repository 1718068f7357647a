"""Rendezvous of MPI ranks by TCP, for libraries that need an address."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.network.interfaces import LOOPBACK, addresses, here, in_order
from hpcdist.errors import CommunicationError

CONNECT_S = 5.0  # for one attempt to reach rank 0 at one of its addresses
STORE_S = 300.0


class Rendezvous(NamedTuple):
    """The store that rank 0 keeps, and this rank's address on the network of the others."""

    store: TCPStore
    address: str


def meet(comm: Communicator, interface: str = "") -> Rendezvous:
    """Collective. Make torch.distributed's store, at a free port of rank 0, which sends its addresses over MPI.

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
    stacks, ports = zip(*comm.gather([here(), port]), strict=True)
    port = ports[0]
    if len(set(stacks)) == 1:
        return Rendezvous(store or TCPStore(LOOPBACK, port, is_master=False, timeout=timeout), LOOPBACK)
    own = addresses(interface)
    theirs = comm.gather([str(a.ip.ip) for a in own])[0]
    host, address = (_reach(in_order(theirs, own), port) if comm.rank > 0 else None) or ("", "")
    reached = comm.gather(host)
    for rank, at in enumerate(reached[1:], 1):
        if not at:
            raise CommunicationError(
                f"rank 0 must be reached by all ranks over TCP; rank {rank} got no answer from port {port} at "
                f"{', '.join(theirs) or 'any address, as rank 0 has none but loopback'}. Name the network that they "
                "share: interface = 'ib0'."
            )
    if comm.rank > 0:
        store = TCPStore(host, port, is_master=False, timeout=timeout)
    return Rendezvous(store, address if comm.rank > 0 else reached[1])


@contextmanager
def default_group(comm: Communicator, backend: str = "gloo") -> Iterator[dist.ProcessGroup]:
    """Collective. Give torch.distributed's default process group inside the context; see `start_default_group`."""
    start_default_group(comm, backend)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def start_default_group(comm: Communicator, backend: str, timeout_s: float | None = None) -> None:
    """Collective. Start torch.distributed's default process group, met at an address that rank 0 tells the others.

    Args:
        backend: gloo, or nccl, for which each rank has a GPU of its own and has chosen it; or one per kind of device.
        timeout_s: of its collectives; torch's own, if None.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=meet(comm).store, rank=comm.rank, world_size=comm.size, timeout=timeout)


def _reach(hosts: list[str], port: int) -> tuple[str, str] | None:
    """Return the first of these addresses that answers, and this rank's own address on that connection."""
    for host in hosts:
        try:
            with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
                return host, connection.getsockname()[0]
        except OSError:
            pass  # another one may be on a network that both share
    return None
