"""Real ranks: the seam over mpi4py.

Buffers are passed in place, nothing on the hot path is pickled, and a blocking call leaves a note of what it waits
for (`comm/mpi/calls.py`), which the watchdog (`comm/mpi/watchdog.py`) reads when the deadline passes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.capabilities import DEADLINE_S, Platform, Trace, number_nodes
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.mpi.attached import find_nodes
from hpcdist.comm.mpi.calls import ANYONE, BROADCAST, EVERYONE, Call, FaultTolerance, clock, world_ranks
from hpcdist.comm.mpi.library import end, version
from hpcdist.comm.mpi.messages import (
    NUMBERS,
    SENDING,
    SUMMED,
    MpiNeighbourhood,
    MpiRequest,
    Staging,
    memory_at,
    numbers,
)
from hpcdist.comm.mpi.process import Process
from hpcdist.comm.mpi.transports import Transports
from hpcdist.comm.mpi.window import MpiWindow
from hpcdist.comm.transfer import (
    ANY,
    TAG_LIMIT,
    WIDE,
    Closed,
    Envelope,
    Neighbourhood,
    Request,
    Traffic,
    check_flat,
    check_rank,
    check_source_and_tag,
    check_tag,
)
from hpcdist.comm.window import Put, Window
from hpcdist.errors import CommunicationError

_IN_PLACE = MPI.IN_PLACE


class MpiCommunicator(Communicator):
    """Collective. Implement the seam over one MPI communicator, which it owns and frees.

    It has `calls`: what it is blocked in.

    Args:
        mpi: an intracommunicator.
        process: what this process has once.
        deadline_s: seconds after which a blocking call ends the run with a message.
        nodes: node index of each rank; by default ranks that can share memory are on one node.
        device_aware: the MPI library reads and writes device memory itself; off unless the user asks.
        internode: how windows are read and written across nodes: `tcp`, `rma`, or `auto` for what a self-test finds
            faster (`comm/mpi/transports.py`). `tcp:ib0`, `auto:10.1.0.0/16`: by this interface or network.
        name: how messages call this communicator.
        traffic: the account of its calls; by default a new one.
    """

    memory: Transports
    failures: FaultTolerance

    def __init__(
        self,
        mpi: MPI.Intracomm,
        process: Process,
        *,
        deadline_s: float = DEADLINE_S,
        nodes: tuple[int, ...] | None = None,
        device_aware: bool = False,
        internode: str = "auto",
        name: str = "communicator",
        traffic: Traffic | None = None,
    ):
        self.mpi, self.process, self.name = mpi, process, name
        self._made_from = 0  # communicators
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.platform, self.trace = Platform(version(), world_ranks(mpi), concurrent=threads), Trace(traffic)
        self.traffic = self.trace.traffic
        numbers_in_job, places = self.platform.world_ranks, process.places
        self.failures = FaultTolerance(mpi, process.tolerant, deadline_s, places, name, numbers_in_job, self.traffic)
        self.calls = self.failures.calls
        self._summing, self._hops = Call("allreduce", EVERYONE, 0.0, deadline_s), 2 * (self.size - 1)
        self.nodes = find_nodes(mpi) if nodes is None else tuple(nodes)
        if (found := len(self.nodes)) != self.size:
            raise CommunicationError(f"nodes must have one index for each of the {self.size} ranks; got {found}.")
        self.staging = Staging(device_aware)
        self.pids = [int.from_bytes(pid, "little") for pid in self.gather(os.getpid().to_bytes(8, "little"))]
        self.memory = Transports(self, internode)
        process.calls[id(self.calls)] = self.calls

    # --- point to point -------------------------------------------------------------------------------------------
    def sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int = 0) -> None:
        check_flat(send, "send")
        check_flat(recv, "recv")
        check_rank(dest, self.size, "dest")
        check_rank(source, self.size, "source")
        check_tag(tag)
        if self.staging.direct(send) and self.staging.direct(recv):
            args = (self.staging.message(send), dest, tag, self.staging.message(recv), source, tag)
            self.calls.communicate("sendrecv", source, self.mpi.Sendrecv, *args)
        else:
            with self.staging.host(send, write=False) as out, self.staging.host(recv, read=False) as into:
                args = (self.staging.message(out), dest, tag, self.staging.message(into), source, tag)
                self.calls.communicate("sendrecv", source, self.mpi.Sendrecv, *args)
        self.traffic.sent(send.nbytes)

    def isend(self, tensor: Tensor, dest: int, tag: int = 0) -> Request:
        check_flat(tensor)
        check_rank(dest, self.size, "dest")
        check_tag(tag)
        host, start = tensor, clock()
        if not self.staging.direct(tensor):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        request = self.calls.attempt(SENDING, dest, self.mpi.Isend, self.staging.message(host), dest, tag)
        self.traffic.communicating_s += clock() - start  # MPI copies or sends here what goes at once
        self.traffic.sent(tensor.nbytes)
        return MpiRequest(self.calls, request, SENDING, dest, host)

    def irecv(self, tensor: Tensor, source: int = ANY, tag: int = ANY) -> Request:
        check_flat(tensor)
        source, tag, peer = self._wanted(source, tag)
        host = tensor if self.staging.direct(tensor) else torch.empty_like(tensor, device="cpu", pin_memory=True)
        request = self.calls.attempt("irecv", peer, self.mpi.Irecv, self.staging.message(host), source, tag)
        return MpiRequest(self.calls, request, "irecv", peer, host, None if host is tensor else tensor)

    def probe(self, source: int = ANY, tag: int = ANY, *, block: bool = True) -> Envelope | None:
        source, tag, peer = self._wanted(source, tag)
        status = MPI.Status()

        def arrived() -> bool:
            return self.calls.attempt("probe", peer, self.mpi.Iprobe, source, tag, status)

        if block:
            whom = "any rank" if peer == ANYONE else f"rank {source}"
            self.calls.await_until(arrived, "probe", f"a message from {whom} on {self.name}", peer)
        elif not arrived():
            return None
        return Envelope(status.Get_source(), status.Get_tag(), status.Get_elements(MPI.BYTE))

    def _wanted(self, source: int, tag: int) -> tuple[int, int, int]:
        """Return MPI's source and tag for a message to receive, and the peer to wait for."""
        check_source_and_tag(source, tag, self.size)
        any_tag = MPI.ANY_TAG if tag == ANY else tag
        return (MPI.ANY_SOURCE, any_tag, ANYONE) if source == ANY else (source, any_tag, source)

    # --- collective -----------------------------------------------------------------------------------------------
    def allreduce(self, tensor: Tensor) -> None:
        """Collective. Sum `tensor` over all ranks in place, by MPI's own all-reduce.

        MPI has no 16-bit floats: those are summed in float32 and rounded once. Integers wrap around. Bytes counted are
        those of a ring, 2n(p-1)/p, the least that any algorithm sends for large n; MPI does not tell what it sent.
        """
        kind = SUMMED.get(tensor.dtype)
        other = kind is None or not tensor.is_cpu or tensor.ndim != 1 or not tensor.is_contiguous()
        if other or tensor.nbytes > self.staging.longest:
            return self._allreduce_converted(tensor)
        # As `communicate` does, written out and with one Call for all: MPI sums a short tensor in 3 µs, of which each
        # call here is a fiftieth and each object made a tenth.
        calls, call, n_bytes = self.calls, self._summing, tensor.nbytes
        outer = calls.current
        call.deadline_s = self.failures.deadline_s
        call.since = start = clock()
        calls.current = call
        calls.count += 1
        try:
            self.failures.surviving.Allreduce(_IN_PLACE, (memory_at(tensor.data_ptr(), n_bytes), kind))
        except MPI.Exception as error:
            raise calls.failure("allreduce", EVERYONE, error) from error
        finally:
            calls.current = outer
            traffic = calls.traffic
            traffic.communicating_s += clock() - start
        hops = self._hops
        traffic.bytes_sent += hops * n_bytes // self.size
        traffic.messages_sent += hops

    def _allreduce_converted(self, tensor: Tensor) -> None:
        check_flat(tensor)
        if tensor.dtype in SUMMED:
            with self.staging.host(tensor) as host:
                for part in host.split(self.staging.longest):
                    self.calls.count += 1
                    into = numbers(part)
                    self.calls.communicate("allreduce", EVERYONE, self.failures.surviving.Allreduce, _IN_PLACE, into)
                self.traffic.sent(self._hops * tensor.nbytes // self.size, self._hops)
        elif tensor.dtype in NUMBERS or tensor.dtype in (torch.float16, torch.bfloat16):
            wide = tensor.detach().to(WIDE.get(tensor.dtype, torch.int32))
            self.allreduce(wide)
            tensor.detach().copy_(wide)
        else:
            raise CommunicationError(f"dtype of a sum must be numeric; got {tensor.dtype}. Convert the tensor first.")

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        check_flat(tensor)
        check_rank(root, self.size, "root")
        self.calls.count += 1
        with self.staging.host(tensor, read=self.rank == root, write=self.rank != root) as host:
            self.calls.communicate(
                BROADCAST,
                root,
                self.failures.surviving.Bcast,
                self.staging.message(host),
                self.failures.alive.index(root),
            )
        if self.rank == root and self.size > 1:
            self.traffic.sent(tensor.nbytes)

    def _gather(self, data: bytes) -> list[bytes | None]:
        surviving, alive = self.failures.surviving, self.failures.alive
        lengths = np.zeros(len(alive), np.int64)
        self.calls.count += 1
        self.calls.communicate("gather", EVERYONE, surviving.Allgather, np.array([len(data)], np.int64), lengths)
        unit = 1 + int(lengths.sum()) // self.staging.longest  # bytes: MPI counts these
        counts = -(-lengths // unit)
        starts = (counts.cumsum() - counts) * unit
        gathered, padded = bytearray(int(counts.sum()) * unit), data + bytes(-len(data) % unit)
        kind = MPI.BYTE if unit == 1 else MPI.BYTE.Create_contiguous(unit).Commit()
        into = [gathered, counts, starts // unit, kind]
        self.calls.communicate("gather", EVERYONE, surviving.Allgatherv, [padded, len(padded) // unit, kind], into)
        others = len(alive) - 1
        self.traffic.sent(len(data) * others, others)
        data_of: list[bytes | None] = [None] * self.size
        for rank, n, start in zip(alive, lengths, starts, strict=True):
            data_of[rank] = bytes(gathered[start : start + n])
        return data_of

    def barrier(self) -> None:
        start = clock()
        self.calls.count += 1
        with self.calls.blocked("barrier", EVERYONE, self.failures.deadline_s):
            self.calls.attempt("barrier", EVERYONE, self.failures.surviving.Barrier)
        self.traffic.waiting_s += clock() - start

    def _split(self, color: int | None, key: int, traffic: Traffic | None) -> MpiCommunicator | None:
        wanted = self.gather([None if color is None else int(color), int(key)])
        mpi = cast(MPI.Intracomm, self.mpi.Split(MPI.UNDEFINED if color is None else color, key))
        self._made_from += 1
        if color is None:
            return None
        members = sorted((choice[1], r) for r, choice in enumerate(wanted) if choice and choice[0] == color)
        return self._among(mpi, [r for _, r in members], str(color), traffic)

    def among(self, ranks: Sequence[int], name: str, deadline_s: float | None = None) -> MpiCommunicator:
        """Collective among these ranks alone. Make a communicator of them, in this order.

        Args:
            name: how messages call it; all that these ranks make have another one.
            deadline_s: in which all of them must come; by default this communicator's.
        """
        limit_s = self.failures.deadline_s if deadline_s is None else deadline_s
        everyone = self.mpi.Get_group()
        group = everyone.Incl(list(ranks))
        what = f"the start of a group of ranks {', '.join(map(str, ranks))}, {name},"
        with self.calls.blocked(what, EVERYONE, limit_s, ranks):
            mpi = self.mpi.Create_group(group, zlib.crc32(name.encode()) % TAG_LIMIT)
        group.Free()
        everyone.Free()
        return self._among(mpi, ranks, name)

    def of_survivors(self) -> MpiCommunicator:
        """Collective among the surviving ranks. Make a communicator of them alone, with numbers of their own."""
        self._made_from += 1
        return self._among(self.failures.surviving.Dup(), self.failures.alive, "living")

    def apart(self, internode: str = "auto", nodes: tuple[int, ...] | None = None) -> MpiCommunicator:
        """Collective. Copy this communicator as if its ranks were on other nodes: for tests and measurements.

        Args:
            nodes: node index of each rank; by default each is on a node of its own.
        """
        nodes = tuple(range(self.size)) if nodes is None else nodes
        self._made_from += 1
        return self._made(self.mpi.Dup(), nodes, internode, "apart")

    def _among(
        self, mpi: MPI.Intracomm, ranks: Iterable[int], name: str, traffic: Traffic | None = None
    ) -> MpiCommunicator:
        nodes = number_nodes(self.nodes[rank] for rank in ranks)
        return self._made(mpi, nodes, self.memory.wanted, name, traffic)

    def _made(
        self, mpi: MPI.Intracomm, nodes: tuple[int, ...], internode: str, name: str, traffic: Traffic | None = None
    ) -> MpiCommunicator:
        return MpiCommunicator(
            mpi,
            self.process,
            deadline_s=self.failures.deadline_s,
            nodes=nodes,
            device_aware=self.staging.device_aware,
            internode=internode,
            name=f"{self.name}/{name}{f'.{self._made_from}' * (self._made_from > 1)}",  # no other one has it
            traffic=traffic,
        )

    def neighbourhood(self, sources: Sequence[int], destinations: Sequence[int]) -> Neighbourhood:
        return MpiNeighbourhood(self, sources, destinations)

    def overlapping(self) -> AbstractContextManager[None]:
        helps = self.platform.concurrent and len(set(self.nodes)) > 1  # inside a node messages need no help
        return self.process.progress.running() if helps else nullcontext()

    def window(self, count: int, dtype: torch.dtype = torch.float32) -> Window:
        return MpiWindow(self, count, dtype)

    def put_all(self, puts: Iterable[Put]) -> None:
        put_all = super().put_all if self.memory.internode is None else self.memory.put_all
        put_all(puts)

    # --- the end --------------------------------------------------------------------------------------------------
    def watch(self, role: Callable[[], str] = str) -> None:
        """Collective. End the job from now on where a call of this thread takes longer than its deadline.

        Args:
            role: tells what is special about this rank, for messages.
        """
        self.process.watch(self.mpi.Dup(), {rank: self.pids[rank] for rank in self.memory.local_ranks}, role)

    def abort(self, status: int = 1) -> None:
        """End every rank of the job, with this exit status; where ranks outlive others and one has died, this rank."""
        if self.failures.tolerant:
            self.failures.end_alone(status)
        end(status)

    def close(self) -> None:
        self.process.calls.pop(id(self.calls), None)
        if self.process.world is self:
            self.process.world = None
        self.memory.close()
        if not self.failures.tolerant:  # freeing is collective, and any rank may be dead by now; the job's end does it
            self.mpi.Free()
            self.mpi = self.failures.all = self.failures.surviving = cast(MPI.Intracomm, Closed())
