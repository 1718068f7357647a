"""Shared memory of a node, and the transport of windows across nodes.

Across nodes there are two transports: TCP, by requests to the owner's threads (`comm/mpi/tcp.py`), and RMA, MPI's
one-sided calls (`comm/mpi/window.py`). Depending on the network and the MPI library, either may be a hundred times
faster. What matters is the speed while the owner computes, not while it waits inside MPI. So a self-test measures that,
once per machine, library and number of nodes.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm import cache
from hpcdist.comm.capabilities import RankMemory
from hpcdist.comm.mpi.attached import AttachedMemory, try_attach
from hpcdist.comm.mpi.calls import ALL_RANKS
from hpcdist.comm.mpi.node_memory import SharedTensor
from hpcdist.comm.mpi.slots import NodeSlots
from hpcdist.comm.mpi.tcp import TcpServer
from hpcdist.comm.mpi.window import MpiWindow
from hpcdist.comm.transfer import check_flat
from hpcdist.comm.window import Memory, Put
from hpcdist.errors import CommunicationError, DataError, MismatchError, UnknownNameError
from hpcdist.records import parse_json

TRANSPORTS = ("tcp", "rma")  # requests to the owner's threads; MPI's one-sided calls
COUNT = 1 << 16  # elements of float32 in a large transfer of the self-test
SPAN_S = 0.1  # seconds that the owner computes, per transport and kind of computation
WORTH = 1.2  # RMA is chosen only if it is faster by this factor, which exceeds noise


def choose(comm: Any, requested: str) -> str:
    """Collective. Return the requested transport; for `auto` the faster one, from the cache or measured.

    Always `tcp` if the job tolerates deaths.
    """
    if requested not in (*TRANSPORTS, "auto"):
        raise UnknownNameError("internode", requested, (*TRANSPORTS, "auto"))
    if comm.failures.tolerant:
        return "tcp"  # a connection breaks when its peer dies; MPI's one-sided calls may then wait forever
    if requested != "auto":
        return requested
    hosts = len(set(comm.gather(platform.node())))
    path = cache.cache_file("internode", comm.platform.library, len(set(comm.nodes)), hosts)

    def check(text: str) -> str:
        transport: str = parse_json(text, path, DataError)["way"]
        if transport not in TRANSPORTS:
            raise ValueError(f"unknown transport {transport!r}")
        return text

    def measure_both() -> str:
        seconds = measure(comm)
        transport = "rma" if seconds["rma"] * WORTH < seconds["tcp"] else "tcp"
        return json.dumps({"way": transport, "seconds": seconds}, indent=1)

    text = cache.load_or_measure(comm, path, check, measure_both, "measurement of windows across nodes")
    return str(json.loads(text)["way"])


def measure(comm: Any) -> dict[str, float]:
    """Collective. Time a small get, a large get and a large put, by transport; return the seconds on all ranks.

    The owner computes at the same time: half of the time in torch, which releases the interpreter lock, half in
    Python, which holds it. Rank 0 owns the memory, the first rank of another node accesses it, other ranks wait.
    """
    copy = comm.split(0)
    origin = next(rank for rank in range(comm.size) if comm.nodes[rank] != comm.nodes[0])
    taken_s = {}
    for transport in TRANSPORTS:
        window = MpiWindow(copy, COUNT if copy.rank == 0 else 0, torch.float32, transport)
        taken_s[transport] = 0.0
        if copy.rank == origin:
            window.get(torch.empty(1), 0)  # connects
        for keeps_lock in (False, True):
            copy.barrier()
            if copy.rank == 0:
                compute(SPAN_S, keeps_lock)
            elif copy.rank == origin:
                taken_s[transport] += _transfer(window, SPAN_S) / 2
        window.close()
    seconds = copy.gather(taken_s)[origin]
    copy.close()
    return seconds


def compute(seconds: float, keeps_lock: bool) -> None:
    """Compute for some time: in Python, which keeps the interpreter lock, or in torch, which releases it."""
    matrix, until = torch.full((192, 192), 1e-3), time.perf_counter() + seconds
    while time.perf_counter() < until:
        if keeps_lock:
            sum(range(1000))
        else:
            matrix @ matrix


def _transfer(window: Any, seconds: float) -> float:
    """Return the mean seconds of a large put, a small and a large get; infinite if the values got are not those put."""
    values, out, first = torch.rand(COUNT), torch.empty(COUNT), torch.empty(1)
    rounds, start = 0, time.perf_counter()
    while rounds == 0 or time.perf_counter() - start < seconds:
        window.put(values, 0)
        window.get(first, 0)
        window.get(out, 0)
        rounds += 1
    taken_s = (time.perf_counter() - start) / rounds
    return taken_s if torch.equal(out, values) else float("inf")


class Transports(RankMemory):
    """The `RankMemory` of real ranks, and the transport of their windows across nodes: TCP or MPI itself.

    Args:
        comm: the MpiCommunicator.
        requested: the transport, as `internode` of MpiCommunicator.
    """

    def __init__(self, comm: Any, requested: str):
        super().__init__(comm.rank, comm.nodes)
        self._comm = comm
        self.requested = requested  # applies to later windows; the interface only if no window exists yet
        self._across_nodes = len(set(comm.nodes)) > 1
        self.can_attach = try_attach(comm) and not self._across_nodes
        self._node_mpi: MPI.Intracomm | None = None
        self._server: TcpServer | None = None
        self._shared: list[SharedTensor] = []

    # --- resources of windows -------------------------------------------------------------------------------------
    def node_mpi(self) -> MPI.Intracomm:
        """Collective at the first call. Return MPI's communicator of the ranks on this rank's node."""
        if self._node_mpi is None:
            self._node_mpi = self._comm.mpi.Split(self._comm.nodes[self._comm.rank], self._comm.rank)
        return self._node_mpi

    def server(self) -> TcpServer:
        """Collective at the first call. Return the server by which ranks of other nodes access this rank's windows."""
        if self._server is None:
            self._server = TcpServer(self._comm, self.requested.partition(":")[2])
        return self._server

    def choose(self) -> str:
        """Collective. Return the transport of windows across nodes, measured at the first call if necessary."""
        transport, colon, interface = self.requested.partition(":")
        transport = choose(self._comm, transport)
        self.requested = transport + colon + interface
        return transport

    @property
    def internode(self) -> str | None:
        """Return the transport in use: `tcp` or `rma`; `auto` before the first window; None on a single node."""
        return self.requested.partition(":")[0] if self._across_nodes else None

    def host(self, tensor: Tensor, *, write: bool = True) -> AbstractContextManager[Tensor]:
        return self._comm.staging.host(tensor, write=write)

    def put_all(self, puts: Iterable[Put]) -> None:
        """Start puts across several nodes and wait for all; puts that don't go over TCP complete one by one."""

        def requests() -> Iterator[tuple[int, int, int, Tensor]]:
            for window, values, rank, offset in puts:
                if isinstance(window, MpiWindow):
                    yield from window.requests(values, rank, offset)
                else:
                    window.put(values, rank, offset)

        self.server().put_all(requests())

    def attach(self, tensor: Tensor) -> Memory:
        """Collective. Let other ranks of the node access a tensor; see `RankMemory.attach`."""
        comm = self._comm
        check_flat(tensor)
        local_range = np.array([tensor.data_ptr(), tensor.nbytes], np.int64)
        ranges = np.empty((comm.size, 2), np.int64)  # address and bytes of each rank's tensor
        comm.calls.count += 1
        comm.calls.communicate("attach", ALL_RANKS, comm.mpi.Allgather, local_range, ranges)
        if (ranges[:, 1] != ranges[0, 1]).any():
            raise MismatchError(
                f"attached tensors must have the same number of bytes on every rank; "
                f"got {ranges[:, 1].tolist()} in rank order."
            )
        return AttachedMemory(comm, tensor, ranges[:, 0].tolist(), self.mapped(tensor))

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        if self._comm.size > 1 and self.can_attach and count > 0:
            with suppress(CommunicationError):  # on all ranks
                self._shared.append(SharedTensor(self._comm, count, dtype))
                return self._shared[-1].local
        return super().zeros(count, dtype)

    def slots(self, n_bytes: int, call: str = "collective call") -> NodeSlots | None:
        """Collective. Create slots; None on several nodes, or if the job tolerates deaths; see `RankMemory.slots`."""
        if self._across_nodes or self._comm.size == 1 or self._comm.failures.tolerant:
            return None
        try:
            return NodeSlots(self._comm, n_bytes, call)
        except CommunicationError:  # on all ranks: their memory can't be mapped
            return None

    def mapped(self, tensor: Tensor) -> list[Tensor]:
        return next((shared.views_of(tensor) for shared in self._shared if shared.holds(tensor)), [])

    # --- the end --------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Collective. End the threads that serve windows, and release MPI's communicator of the node."""
        self._shared.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._node_mpi is not None and not self._comm.failures.tolerant:
            self._node_mpi.Free()
            self._node_mpi = None
