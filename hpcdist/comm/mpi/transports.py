"""The windows of one communicator, and their transports to other ranks' memory.

Across nodes there are two, and a self-test chooses between them. TCP: requests to the owner's threads
(`comm/mpi/tcp.py`); RMA: MPI's one-sided calls (`comm/mpi/window.py`). Either may be a hundred times faster, by the
network and the MPI library, and its speed matters while the owner computes, not while it waits inside MPI. So that is
measured, once per machine, library and number of nodes.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm import cache
from hpcdist.comm.capabilities import RankMemory
from hpcdist.comm.mpi.attached import AttachedMemory, try_attach
from hpcdist.comm.mpi.calls import EVERYONE
from hpcdist.comm.mpi.node_memory import SharedTensor
from hpcdist.comm.mpi.slots import NodeSlots
from hpcdist.comm.mpi.tcp import TcpServer
from hpcdist.comm.mpi.window import MpiWindow
from hpcdist.comm.transfer import check_flat
from hpcdist.comm.window import Memory, Put
from hpcdist.errors import CommunicationError, DataError, MismatchError, UnknownNameError
from hpcdist.records import parse_json

WAYS = ("tcp", "rma")  # requests to the owner's threads; MPI's one-sided calls
COUNT = 1 << 16  # elements of float32 in a large transfer of the self-test
SPAN_S = 0.1  # how long the owner computes for each way and kind of computation
WORTH = 1.2  # one-sided calls must be faster by this factor: the difference must be more than noise


def choose(comm, wanted: str) -> str:
    """Collective. Return the transport wanted, or for `auto` the faster one: from the cache, or measured.

    Where a rank's death is survived it is `tcp`, whatever is wanted. Rank 0 alone reads and writes the cache.
    """
    if wanted not in (*WAYS, "auto"):
        raise UnknownNameError("internode", wanted, (*WAYS, "auto"))
    if comm.failures.tolerant:
        return "tcp"  # a connection breaks when its peer dies; MPI's one-sided calls may then wait for ever
    if wanted != "auto":
        return wanted
    hosts = len(set(comm.gather(platform.node())))
    path = cache.cache_file("internode", comm.platform.library, len(set(comm.nodes)), hosts)

    def check(text: str) -> str:
        way: str = parse_json(text, path, DataError)["way"]
        if way not in WAYS:
            raise ValueError(f"unknown way {way!r}")
        return text

    def measure_both() -> str:
        seconds = measure(comm)
        way = "rma" if seconds["rma"] * WORTH < seconds["tcp"] else "tcp"
        return json.dumps({"way": way, "seconds": seconds}, indent=1)

    text = cache.load_or_measure(comm, path, check, measure_both, "measurement of windows across nodes")
    return str(json.loads(text)["way"])


def measure(comm) -> dict[str, float]:
    """Collective. Time a small get, a large get and a large put together, by transport; the same on all ranks.

    The owner computes meanwhile: half of the time in torch, which gives up the interpreter lock, half in Python,
    which keeps it. Rank 0 owns the memory, the first rank of another node reads and writes it, the others wait.
    """
    own = comm.split(0)
    asker = next(rank for rank in range(comm.size) if comm.nodes[rank] != comm.nodes[0])
    taken_s = {}
    for way in WAYS:
        window = MpiWindow(own, COUNT if own.rank == 0 else 0, torch.float32, way)
        taken_s[way] = 0.0
        if own.rank == asker:
            window.get(torch.empty(1), 0)  # connects
        for keeps_lock in (False, True):
            own.barrier()
            if own.rank == 0:
                _compute(SPAN_S, keeps_lock)
            elif own.rank == asker:
                taken_s[way] += _transfer(window, SPAN_S) / 2
        window.close()
    seconds = own.gather(taken_s)[asker]
    own.close()
    return seconds


def _compute(seconds: float, keeps_lock: bool) -> None:
    matrix, until = torch.full((192, 192), 1e-3), time.perf_counter() + seconds
    while time.perf_counter() < until:
        if keeps_lock:
            sum(range(1000))
        else:
            matrix @ matrix


def _transfer(window, seconds: float) -> float:
    """Time a round of transfers, in seconds; infinite if a get does not return the values of the put before."""
    values, out, one = torch.rand(COUNT), torch.empty(COUNT), torch.empty(1)
    rounds, start = 0, time.perf_counter()
    while rounds == 0 or time.perf_counter() - start < seconds:
        window.put(values, 0)
        window.get(one, 0)
        window.get(out, 0)
        rounds += 1
    taken_s = (time.perf_counter() - start) / rounds
    return taken_s if torch.equal(out, values) else float("inf")


class Transports(RankMemory):
    """The memory that ranks of a node share beside windows, and what windows reach other nodes by: TCP, or MPI itself.

    Args:
        comm: the MpiCommunicator that has these.
        wanted: how windows are read and written across nodes, see MpiCommunicator.
    """

    def __init__(self, comm, wanted: str):
        super().__init__(comm.rank, comm.nodes)
        self._comm = comm
        self.wanted = wanted  # counts for windows made from now on, by the interface of the first
        self._across_nodes = len(set(comm.nodes)) > 1
        self.can_attach = try_attach(comm) and not self._across_nodes
        self._node_mpi: MPI.Intracomm | None = None
        self._server: TcpServer | None = None
        self._shared: list[SharedTensor] = []

    # --- what windows are made of ---------------------------------------------------------------------------------
    def node_mpi(self) -> MPI.Intracomm:
        """Collective at the first call. Return MPI's communicator of the ranks on this rank's node."""
        if self._node_mpi is None:
            self._node_mpi = self._comm.mpi.Split(self._comm.nodes[self._comm.rank], self._comm.rank)
        return self._node_mpi

    def server(self) -> TcpServer:
        """Collective at the first call. Return the server of windows to ranks of other nodes."""
        if self._server is None:
            self._server = TcpServer(self._comm, self.wanted.partition(":")[2])
        return self._server

    def choose(self) -> str:
        """Collective. Choose the transport of windows across nodes; it is measured at the first call if necessary."""
        way, colon, interface = self.wanted.partition(":")
        way = choose(self._comm, way)
        self.wanted = way + colon + interface
        return way

    @property
    def internode(self) -> str | None:
        """Return the transport in use: `tcp` or `rma`; `auto` before the first window; None where there is one node."""
        return self.wanted.partition(":")[0] if self._across_nodes else None

    def host(self, tensor: Tensor, *, write: bool = True) -> AbstractContextManager[Tensor]:
        return self._comm.staging.host(tensor, write=write)

    def put_all(self, puts: Iterable[Put]) -> None:
        """Start puts and wait for all, where there are several nodes; see Communicator.put_all.

        Puts that TCP does not serve complete one by one.
        """

        def requests() -> Iterator[tuple[int, int, int, Tensor]]:
            for window, values, rank, offset in puts:
                if isinstance(window, MpiWindow):
                    yield from window.requests(values, rank, offset)
                else:
                    window.put(values, rank, offset)

        self.server().put_all(requests())

    def attach(self, tensor: Tensor) -> Memory:
        """Collective. Make memory that other ranks of the node may use; see RankMemory.attach."""
        comm = self._comm
        if not self.can_attach:
            raise CommunicationError(
                f"{comm.name} must lie within one node whose kernel allows cross-memory attach; "
                "can_attach tells. Use a window, or another collective."
            )
        check_flat(tensor)
        own = np.array([tensor.data_ptr(), tensor.nbytes], np.int64)
        ranges = np.empty((comm.size, 2), np.int64)
        comm.calls.count += 1
        comm.calls.communicate("attach", EVERYONE, comm.mpi.Allgather, own, ranges)
        if (ranges[:, 1] != ranges[0, 1]).any():
            raise MismatchError(
                f"tensors attached together must have the same number of bytes on every rank; "
                f"got {ranges[:, 1].tolist()} in rank order."
            )
        return AttachedMemory(comm, tensor, ranges[:, 0].tolist(), self._mapped(tensor))

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        if self._comm.size > 1 and self.can_attach and count > 0:
            with suppress(CommunicationError):  # on all ranks
                self._shared.append(SharedTensor(self._comm, count, dtype))
                return self._shared[-1].local
        return super().zeros(count, dtype)

    def slots(self, n_bytes: int, call: str = "collective call") -> NodeSlots | None:
        """Collective. Make slots where all ranks are on one node, and none may die; see RankMemory.slots."""
        if self._across_nodes or self._comm.size == 1 or self._comm.failures.tolerant:
            return None
        try:
            return NodeSlots(self._comm, n_bytes, call)
        except CommunicationError:  # on all ranks: their memory can't be mapped
            return None

    def is_shared(self, tensor: Tensor) -> bool:
        return any(shared.holds(tensor) for shared in self._shared)

    def _mapped(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks as they are mapped here; none where they are not."""
        return next((shared.beside(tensor) for shared in self._shared if shared.holds(tensor)), [])

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
