"""All-reduce by process groups of torch.distributed (NCCL or Gloo), with a rendezvous over TCP."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.external.base import WATCHDOG_S, OtherLibrary
from hpcdist.comm.network import LOOPBACK, addresses, listen, shared_first, stack_id
from hpcdist.errors import CommunicationError, ConfigError

if TYPE_CHECKING:  # it starts MPI, which importing this must not
    from hpcdist.comm.mpi.communicator import MpiCommunicator

LONGEST_S = 1e7  # longest timeout that torch.distributed accepts


class ProcessGroup(OtherLibrary):
    """Collective. All-reduce by torch.distributed, in a separate process group: no default group is needed.

    The rendezvous uses an address that rank 0 sends over MPI.

    Args:
        comm: real ranks.
        backend: nccl, for tensors on GPUs, one per rank; or gloo, for tensors on any device.
        interface: name of a network interface, or a network, for the rendezvous and for Gloo; by default the fastest
            one. NCCL chooses an interface by NCCL_SOCKET_IFNAME.

    Raises:
        ConfigError: there is no NCCL, or a rank has no GPU.
        CommunicationError: ranks don't reach each other.

    Reference: Shen Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020.
    """

    def __init__(self, comm: MpiCommunicator, backend: str, interface: str = ""):
        super().__init__(comm)
        self.backend, self.label = backend, {"nccl": "NCCL", "gloo": "Gloo"}[backend]
        if backend == "nccl":
            self._require_gpus()
        point = rendezvous(comm, interface)
        self._store: TCPStore | None = point.store
        self._group = self._create(point)

    def _require_gpus(self) -> None:
        """Collective. Check that every rank has a GPU; raise ConfigError on all ranks otherwise."""
        reason = ""
        if not dist.is_nccl_available():
            reason = "its torch was built without NCCL"
        elif not torch.cuda.is_available():
            reason = "torch finds no CUDA device"
        for rank, text in enumerate(self.comm.gather(reason)):
            if text:
                raise ConfigError(
                    f"NCCL must have a GPU on every rank; rank {rank} has none: {text}. Use provider = "
                    "'hpcdist', 'horovod' or 'gloo' there."
                )

    def _create(self, point: Rendezvous) -> Any:
        """Collective. Create the process group."""
        kind: Any = dist.ProcessGroupGloo if self.backend == "gloo" else dist.ProcessGroupNCCL
        options = kind._Options() if self.backend == "gloo" else kind.Options()
        if self.backend == "gloo":
            options._devices = [kind.create_device(hostname=point.address)]
        options._timeout = timeout_of(self.comm)
        return kind(point.store, self.comm.rank, self.comm.size, options)

    def check(self, tensor: Tensor) -> None:
        if self.backend == "nccl" and not tensor.is_cuda:
            raise ConfigError(
                f"tensors must be on a GPU to be summed by NCCL; got one on {tensor.device}. Move the model there, or "
                "use provider = 'gloo'."
            )

    def _start(self, tensor: Tensor, name: str) -> Any:
        return self._group.allreduce([tensor])

    def _poll(self, handle: Any) -> bool:
        return bool(handle.is_completed())

    def _finish(self, handle: Any) -> None:
        handle.wait()

    def close(self) -> None:
        if self._group is not None:
            self.comm.barrier()  # rank 0 serves the store to all ranks
            (self._group.shutdown if hasattr(self._group, "shutdown") else self._group._shutdown)()
            self._group = self._store = None


CONNECT_S = 5.0  # limit to reach rank 0 at one of its addresses
STORE_S = 300.0


class Rendezvous(NamedTuple):
    """The store on rank 0, the address at which this rank reaches it, and this rank's address on that network."""

    store: TCPStore
    host: str
    address: str


def rendezvous(comm: Communicator, interface: str = "") -> Rendezvous:
    """Collective. Create torch.distributed's store at a free port of rank 0, which sends its addresses over MPI.

    Any process that reaches the store may read and change it: torch has no authentication. So it listens only on
    loopback if all ranks share a network stack; on the one address at which all ranks reach rank 0; and on all
    addresses only if ranks in different networks reach different ones.

    Args:
        interface: name of a network interface, or a network such as 10.1.0.0/16; by default the fastest one.

    Raises:
        CommunicationError: a rank reaches none of rank 0's addresses.
        UnknownNameError: a host has no such interface or network.
    """
    stacks = comm.gather(stack_id())
    shares_stack = [stack == stacks[0] for stack in stacks]
    listen_at, host, address = [LOOPBACK] * 3 if all(shares_stack) else _probe_addresses(comm, interface, shares_stack)
    listener = listen(listen_at) if comm.rank == 0 else None
    port = comm.gather(listener.getsockname()[1] if listener else 0)[0]
    store = TCPStore(
        host, port, is_master=listener is not None, wait_for_workers=False, timeout=timedelta(seconds=STORE_S),
        master_listen_fd=listener.detach() if listener else None,
    )  # fmt: skip
    return Rendezvous(store, host, address)


def _probe_addresses(comm: Communicator, interface: str, near: list[bool]) -> tuple[str, str, str]:
    """Collective. Find the addresses at which the ranks reach rank 0, by connecting to a test socket.

    Ranks `near` rank 0, in its network stack, use an address that another rank has reached. Returns the address at
    which rank 0 should listen, empty for all; its address for this rank; and this rank's address.
    """
    local = addresses(interface)
    with listen() if comm.rank == 0 else nullcontext() as probe:
        of_rank0, port = comm.gather([[str(a.ip.ip) for a in local], probe.getsockname()[1] if probe else 0])[0]
        host, address = (None if near[comm.rank] else _reach(shared_first(of_rank0, local), port)) or ("", "")
        reached = comm.gather(host)
    others = {rank: at for rank, at in enumerate(reached) if not near[rank]}
    for rank, at in others.items():
        if not at:
            raise CommunicationError(
                f"rank 0 must be reached by all ranks over TCP; rank {rank} got no answer from port {port} at "
                f"{', '.join(of_rank0) or 'any address, as rank 0 has none but loopback'}. Name the network that they "
                "share: interface = 'ib0'."
            )
    first, *further = dict.fromkeys(others.values())
    return "" if further else first, host or first, address or first


def timeout_of(comm: Communicator, later_s: float = 2 * WATCHDOG_S) -> timedelta:
    """Return the timeout of a process group: for Gloo and NCCL a later one, so that hpcdist reports first."""
    return timedelta(seconds=min(comm.failures.deadline_s + later_s, LONGEST_S))


def _reach(hosts: list[str], port: int) -> tuple[str, str] | None:
    """Return the first of these addresses that accepts a connection, and this rank's address on it."""
    for host in hosts:
        try:
            with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
                return host, connection.getsockname()[0]
        except OSError:
            pass  # another address may be on a shared network
    return None
