"""The communicator of real ranks, over mpi4py.

Buffers are passed in place, and nothing on the hot path is pickled. A blocking call records what it waits for
(`comm/mpi/calls.py`); the watchdog (`comm/mpi/watchdog.py`) reads this record when the deadline passes.
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
from hpcdist.comm.mpi.calls import ALL_RANKS, ANY_RANK, BROADCAST, Call, FaultTolerance, clock, world_ranks
from hpcdist.comm.mpi.library import end, version
from hpcdist.comm.mpi.messages import NUMBERS, SENDING, SUMMED, MpiRequest, Staging, memory_at
from hpcdist.comm.mpi.process import Process
from hpcdist.comm.mpi.transports import Transports
from hpcdist.comm.mpi.window import MpiWindow
from hpcdist.comm.transfer import ANY, TAG_LIMIT, WIDE, Closed, Envelope, Request, Traffic, check_flat
from hpcdist.comm.window import Put, Window
from hpcdist.errors import CommunicationError

_IN_PLACE = MPI.IN_PLACE


class MpiCommunicator(Communicator):
    """Collective. A communicator over one MPI communicator, which it owns and frees.

    Args:
        deadline_s: seconds after which a blocking call ends the run with a message.
        nodes: node index of each rank; by default ranks that can share memory are on one node.
        device_aware: the MPI library reads and writes device memory itself; off unless the user asks for it.
        internode: transport of windows across nodes: `tcp`, `rma`, or `auto` for the faster one in a self-test
            (`comm/mpi/transports.py`). `tcp:ib0`, `auto:10.1.0.0/16`: by this interface or network.
        name: name of the communicator in messages.
        traffic: counts its transfers; by default a new one.

    Attributes:
        calls: the call that this rank is blocked in, for the watchdog.
    """

    memory: Transports
    failures: FaultTolerance

    def __init__(
        self, mpi: MPI.Intracomm, process: Process, *, deadline_s: float = DEADLINE_S,
        nodes: tuple[int, ...] | None = None, device_aware: bool = False, internode: str = "auto",
        name: str = "communicator", traffic: Traffic | None = None,
    ):  # fmt: skip
        self.mpi, self.process, self.name = mpi, process, name
        self._n_derived = 0  # communicators created from this one
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.platform, self.trace = Platform(version(), world_ranks(mpi), concurrent=threads), Trace(traffic)
        self.traffic = self.trace.traffic
        numbers_in_job, locate = self.platform.world_ranks, process.locate_ranks
        self.failures = FaultTolerance(mpi, process.tolerant, deadline_s, locate, name, numbers_in_job, self.traffic)
        self.calls = self.failures.calls
        self._summing, self._hops = Call("allreduce", ALL_RANKS, 0.0, deadline_s), 2 * (self.size - 1)
        self.nodes = find_nodes(mpi) if nodes is None else tuple(nodes)
        if (n_nodes := len(self.nodes)) != self.size:
            raise CommunicationError(f"nodes must have one index for each of the {self.size} ranks; got {n_nodes}.")
        self.staging = Staging(device_aware)
        self.pids = [int.from_bytes(pid, "little") for pid in self.gather(os.getpid().to_bytes(8, "little"))]
        self.memory = Transports(self, internode)
        process.calls[id(self.calls)] = self.calls

    # --- point to point -------------------------------------------------------------------------------------------
    def _sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int) -> None:
        if self.staging.direct(send) and self.staging.direct(recv):
            args = (self.staging.message(send), dest, tag, self.staging.message(recv), source, tag)
            self.calls.communicate("sendrecv", source, self.mpi.Sendrecv, *args)
        else:
            with self.staging.host(send, write=False) as out, self.staging.host(recv, read=False) as into:
                args = (self.staging.message(out), dest, tag, self.staging.message(into), source, tag)
                self.calls.communicate("sendrecv", source, self.mpi.Sendrecv, *args)
        self.traffic.sent(send.nbytes)

    def _isend(self, tensor: Tensor, dest: int, tag: int) -> Request:
        host, start = tensor, clock()
        if not self.staging.direct(tensor):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        request = self.calls.attempt(SENDING, dest, self.mpi.Isend, self.staging.message(host), dest, tag)
        self.traffic.communicating_s += clock() - start  # MPI copies or sends short messages in this call
        self.traffic.sent(tensor.nbytes)
        return MpiRequest(self.calls, request, SENDING, dest, host)

    def _irecv(self, tensor: Tensor, source: int, tag: int) -> Request:
        source, tag, peer = self._mpi_source(source, tag)
        host = tensor if self.staging.direct(tensor) else torch.empty_like(tensor, device="cpu", pin_memory=True)
        request = self.calls.attempt("irecv", peer, self.mpi.Irecv, self.staging.message(host), source, tag)
        return MpiRequest(self.calls, request, "irecv", peer, host, None if host is tensor else tensor)

    def _probe(self, source: int, tag: int, block: bool) -> Envelope | None:
        source, tag, peer = self._mpi_source(source, tag)
        status = MPI.Status()

        def arrived() -> bool:
            return self.calls.attempt("probe", peer, self.mpi.Iprobe, source, tag, status)

        if block:
            whom = "any rank" if peer == ANY_RANK else f"rank {source}"
            self.calls.await_until(arrived, "probe", f"a message from {whom} on {self.name}", peer)
        elif not arrived():
            return None
        return Envelope(status.Get_source(), status.Get_tag(), status.Get_elements(MPI.BYTE))

    def _mpi_source(self, source: int, tag: int) -> tuple[int, int, int]:
        """Convert the source and tag of a receive to MPI's; return them and the peer to wait for."""
        any_tag = MPI.ANY_TAG if tag == ANY else tag
        return (MPI.ANY_SOURCE, any_tag, ANY_RANK) if source == ANY else (source, any_tag, source)

    # --- collective -----------------------------------------------------------------------------------------------
    def allreduce(self, tensor: Tensor) -> None:
        """Collective. Sum `tensor` over all ranks in place, by MPI's all-reduce.

        MPI has no 16-bit floats: these are summed in float32 and rounded once. Integers wrap around. Bytes are counted
        as those of a ring, 2n(p-1)/p, the minimum of all algorithms for large n; MPI does not report what it sent.
        """
        mpi_type = SUMMED.get(tensor.dtype)
        unsuitable = mpi_type is None or not tensor.is_cpu or tensor.ndim != 1 or not tensor.is_contiguous()
        if unsuitable or tensor.nbytes > self.staging.longest:
            return self._allreduce_converted(tensor)
        # The same as `communicate`, inlined and with one reused Call: MPI sums a short tensor in 3 µs, of which each
        # function call here costs 2 % and each new object 10 %.
        calls, call, n_bytes = self.calls, self._summing, tensor.nbytes
        outer = calls.current
        call.deadline_s = self.failures.deadline_s
        call.since = start = clock()
        calls.current = call
        calls.count += 1
        try:
            self.failures.surviving.Allreduce(_IN_PLACE, (memory_at(tensor.data_ptr(), n_bytes), mpi_type))
        except MPI.Exception as error:
            raise calls.failure("allreduce", ALL_RANKS, error) from error
        finally:
            calls.current = outer
            traffic = calls.traffic
            traffic.communicating_s += clock() - start
        hops = self._hops
        traffic.bytes_sent += hops * n_bytes // self.size
        traffic.messages_sent += hops

    def _allreduce_converted(self, tensor: Tensor) -> None:
        """Sum a tensor that MPI can't sum directly: long, on a device, or of a dtype without an MPI sum."""
        check_flat(tensor)
        if tensor.dtype in SUMMED:
            with self.staging.host(tensor) as host:
                for part in host.split(self.staging.longest):
                    self.calls.count += 1
                    into = [memory_at(part.data_ptr(), part.nbytes), part.numel(), SUMMED[part.dtype]]
                    self.calls.communicate("allreduce", ALL_RANKS, self.failures.surviving.Allreduce, _IN_PLACE, into)
                self.traffic.sent(self._hops * tensor.nbytes // self.size, self._hops)
        elif tensor.dtype in NUMBERS or tensor.dtype in (torch.float16, torch.bfloat16):
            wide = tensor.detach().to(WIDE.get(tensor.dtype, torch.int32))
            self.allreduce(wide)
            tensor.detach().copy_(wide)
        else:
            raise CommunicationError(f"dtype of a sum must be numeric; got {tensor.dtype}. Convert the tensor first.")

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        self.calls.count += 1
        with self.staging.host(tensor, read=self.rank == root, write=self.rank != root) as host:
            self.calls.communicate(
                BROADCAST, root, self.failures.surviving.Bcast, self.staging.message(host),
                self.failures.alive.index(root),
            )  # fmt: skip
        if self.rank == root and self.size > 1:
            self.traffic.sent(tensor.nbytes)

    def _gather(self, data: bytes) -> list[bytes | None]:
        surviving, alive = self.failures.surviving, self.failures.alive
        lengths = np.zeros(len(alive), np.int64)
        self.calls.count += 1
        self.calls.communicate("gather", ALL_RANKS, surviving.Allgather, np.array([len(data)], np.int64), lengths)
        unit = 1 + int(lengths.sum()) // self.staging.longest  # bytes per element, so that MPI's counts fit 32 bits
        counts = -(-lengths // unit)  # elements of each rank
        starts = (counts.cumsum() - counts) * unit  # in bytes
        gathered, padded = bytearray(int(counts.sum()) * unit), data + bytes(-len(data) % unit)
        mpi_type = MPI.BYTE if unit == 1 else MPI.BYTE.Create_contiguous(unit).Commit()
        into = [gathered, counts, starts // unit, mpi_type]
        self.calls.communicate("gather", ALL_RANKS, surviving.Allgatherv, [padded, len(padded) // unit, mpi_type], into)
        others = len(alive) - 1
        self.traffic.sent(len(data) * others, others)
        data_of: list[bytes | None] = [None] * self.size
        for rank, n, start in zip(alive, lengths, starts, strict=True):
            data_of[rank] = bytes(gathered[start : start + n])
        return data_of

    def barrier(self) -> None:
        start = clock()
        self.calls.count += 1
        with self.calls.blocked("barrier", ALL_RANKS, self.failures.deadline_s):
            self.calls.attempt("barrier", ALL_RANKS, self.failures.surviving.Barrier)
        self.traffic.waiting_s += clock() - start

    def all_gather(self, out: Tensor, local: Tensor) -> None:
        """Collective. Gather all ranks' `local`, shape (n,), in `out`, shape (ranks * n,), in rank order, by MPI.

        Tensors must not overlap, and lie on the host. Bytes are counted as the minimum that ranks must send.
        """
        self._exchange("all-gather", self.mpi.Allgather, local, out, local.numel())

    def all_to_all(self, out: Tensor, inputs: Tensor) -> None:
        """Collective. Send each rank its n elements of `inputs`, and gather in `out` all ranks' elements for this one.

        Both tensors have the shape (ranks * n,); otherwise as for `all_gather`.
        """
        self._exchange("all-to-all", self.mpi.Alltoall, inputs, out, inputs.numel() // self.size)

    def _exchange(self, what: str, function: Callable[..., None], send: Tensor, out: Tensor, count: int) -> None:
        """Collective. Call MPI's `function`; `count` elements go to each rank."""
        self.calls.count += 1
        message = self.staging.message
        self.calls.communicate(what, ALL_RANKS, function, message(send, count), message(out, count))
        self.traffic.sent((self.size - 1) * count * send.itemsize, self.size - 1)

    def _split(self, color: int | None, key: int, traffic: Traffic | None) -> MpiCommunicator | None:
        choices = self.gather([None if color is None else int(color), int(key)])
        mpi = cast(MPI.Intracomm, self.mpi.Split(MPI.UNDEFINED if color is None else color, key))
        self._n_derived += 1
        if color is None:
            return None
        members = sorted((choice[1], r) for r, choice in enumerate(choices) if choice and choice[0] == color)
        return self._derive_subset(mpi, [r for _, r in members], str(color), traffic)

    def among(self, ranks: Sequence[int], name: str, deadline_s: float) -> MpiCommunicator:
        """Collective among these ranks only. Create a communicator of them, in this order.

        Args:
            name: name in messages; unique among the communicators of these ranks.
            deadline_s: time limit of the call.
        """
        everyone = self.mpi.Get_group()
        group = everyone.Incl(list(ranks))
        what = f"the start of a group of ranks {', '.join(map(str, ranks))}, {name},"
        with self.calls.blocked(what, ALL_RANKS, deadline_s, ranks):
            mpi = self.mpi.Create_group(group, zlib.crc32(name.encode()) % TAG_LIMIT)
        group.Free()
        everyone.Free()
        return self._derive_subset(mpi, ranks, name)

    def of_survivors(self) -> MpiCommunicator:
        """Collective among the surviving ranks. Create a communicator of these ranks, renumbered from 0."""
        self._n_derived += 1
        return self._derive_subset(self.failures.surviving.Dup(), self.failures.alive, "living")

    def apart(self, internode: str = "auto", nodes: tuple[int, ...] | None = None) -> MpiCommunicator:
        """Collective. Copy this communicator as if its ranks were on other nodes: for tests and measurements.

        Args:
            nodes: node index of each rank; by default each rank is on a separate node.
        """
        nodes = tuple(range(self.size)) if nodes is None else nodes
        self._n_derived += 1
        return self._derive(self.mpi.Dup(), nodes, internode, "apart")

    def _derive_subset(
        self, mpi: MPI.Intracomm, ranks: Iterable[int], name: str, traffic: Traffic | None = None
    ) -> MpiCommunicator:
        nodes = number_nodes(self.nodes[rank] for rank in ranks)
        return self._derive(mpi, nodes, self.memory.requested, name, traffic)

    def _derive(
        self, mpi: MPI.Intracomm, nodes: tuple[int, ...], internode: str, name: str, traffic: Traffic | None = None
    ) -> MpiCommunicator:
        """Create a communicator over `mpi` with this one's settings."""
        return MpiCommunicator(
            mpi, self.process, deadline_s=self.failures.deadline_s, nodes=nodes, device_aware=self.staging.device_aware,
            internode=internode, name=f"{self.name}/{name}{f'.{self._n_derived}' * (self._n_derived > 1)}",  # unique
            traffic=traffic,
        )  # fmt: skip

    def overlapping(self) -> AbstractContextManager[None]:
        helps = self.platform.concurrent and len(set(self.nodes)) > 1  # inside a node messages progress anyway
        return self.process.progress.running() if helps else nullcontext()

    def _window(self, count: int, dtype: torch.dtype) -> Window:
        return MpiWindow(self, count, dtype)

    def put_all(self, puts: Iterable[Put]) -> None:
        put_all = super().put_all if self.memory.internode is None else self.memory.put_all
        put_all(puts)

    # --- the end --------------------------------------------------------------------------------------------------
    def watch(self, role: Callable[[], str] = str) -> None:
        """Collective. Start the watchdog: it ends the job if a call of this thread takes longer than its deadline.

        `role` is as for `Watchdog`.
        """
        self.process.watch(self.mpi.Dup(), {rank: self.pids[rank] for rank in self.memory.local_ranks}, role)

    def abort(self, status: int = 1) -> None:
        """End all ranks with this exit status; only this rank if the job tolerates deaths and one has died."""
        if self.failures.tolerant:
            self.failures.end_alone(status)
        end(status)

    def close(self) -> None:
        self.process.calls.pop(id(self.calls), None)
        if self.process.world is self:
            self.process.world = None
        self.memory.close()
        if not self.failures.tolerant:  # freeing is collective, but ranks may be dead; then the job's end frees it
            self.mpi.Free()
            self.mpi = self.failures.all = self.failures.surviving = cast(MPI.Intracomm, Closed())
