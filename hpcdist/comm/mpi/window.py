"""Windows of real ranks: shared memory inside a node; across nodes the faster transport by `comm/mpi/transports.py`.

Inside a node every rank's memory is mapped by all: `get` and `put` are plain copies that need nobody's help. Atomic
operations are carried out there under a lock that the ranks share (`comm/mpi/node_memory.py`), and across nodes by
the owner's threads. Threads do so inside a node too where a rank's death is survived: a rank that died with the lock of
another's memory would keep it. There the memory is not MPI's either (`comm/mpi/node_memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor

from hpcdist.comm.mpi.attached import PeerMemory
from hpcdist.comm.mpi.calls import clock
from hpcdist.comm.mpi.messages import Staging
from hpcdist.comm.mpi.node_memory import LockedMemory, NodeMemory, OwnedMemory
from hpcdist.comm.mpi.rma import OneSided
from hpcdist.comm.mpi.tcp import TcpTransfers
from hpcdist.comm.window import Memory, Window, check_count, refuse_attached

_PIECE = 1 << 18  # elements that are changed under one lock, of a few tensors that a core's caches hold


class MpiWindow(Window):
    """Collective. A window over `count` zeroed elements of `dtype` on this rank.

    Args:
        comm: the MpiCommunicator.
        way: how other nodes are reached, instead of the communicator's own way.
    """

    def __init__(self, comm, count: int, dtype: torch.dtype, way: str | None = None):
        check_count(count)
        self.comm, self._own_rank, self._tolerant = comm, comm.rank, comm.failures.tolerant
        lengths = [n or 0 for n in comm.gather(int(count))]
        if self._tolerant:
            self._shared: NodeMemory = OwnedMemory(comm, count * dtype.itemsize, dtype)
        else:
            node, limit_s = comm.memory.node_mpi(), comm.failures.deadline_s
            self._shared = LockedMemory(node, count * dtype.itemsize, dtype, limit_s)
        ranks = [r for r in range(comm.size) if comm.memory.nodes[r] == comm.memory.nodes[comm.rank]]
        self._node_rank = {rank: i for i, rank in enumerate(ranks)}
        self._memory = {rank: self._shared.parts[i] for rank, i in self._node_rank.items()}
        super().__init__(self._memory[comm.rank], lengths)
        self.local.zero_()
        self._staging = Staging()  # never device-aware: MPI may read what it adds with plain loads
        self._served: TcpTransfers | None = None  # does what only the owner's threads may do
        self._bulk: TcpTransfers | OneSided | None = None  # gets and puts across nodes
        if len(ranks) < comm.size or self._tolerant:
            self._served = comm.memory.server().expose(self)
        if len(ranks) < comm.size:
            way = way or comm.memory.choose()
            self._bulk = OneSided(comm, self.local) if way == "rma" else self._served
        # A rank can be woken where it is told of all changes, which it is not of those that MPI makes one-sidedly.
        wakes = isinstance(self._shared, LockedMemory) and self._bulk is self._served
        self._wakes = cast(LockedMemory, self._shared) if wakes else None
        comm.barrier()

    # --- transfers ------------------------------------------------------------------------------------------------
    def _get(self, out: Tensor, rank: int, offset: int) -> None:
        memory = self._at(rank, offset, out.numel())
        if memory is None:
            with self._staging.host(out, read=False) as host:
                self._bulk.get(host, rank, offset)
        else:
            start = clock()
            self._shared.sync()
            out.copy_(memory)
            self.comm.traffic.communicating_s += clock() - start
        if rank != self.comm.rank:
            self.comm.traffic.fetched(out.nbytes)

    def read(self, rank: int, offset: int, count: int, out: Tensor | None = None) -> Tensor:
        self._check(rank, offset, count=count)
        memory = self._at(rank, offset, count)
        if memory is None:
            return super().read(rank, offset, count, out)
        self._shared.sync()
        if rank != self.comm.rank:
            self.comm.traffic.fetched(memory.nbytes)
        return memory

    def _put(self, values: Tensor, rank: int, offset: int) -> None:
        memory, traffic = self._at(rank, offset, values.numel()), self.comm.traffic
        if memory is None:
            with self._staging.host(values, write=False) as host:
                self._bulk.put(host, rank, offset)
        else:
            start = clock()
            memory.copy_(values)
            self._shared.sync()
            self.wake(rank)
            traffic.communicating_s += clock() - start
        if rank != self.comm.rank:
            traffic.sent(values.nbytes)

    def requests(self, values: Tensor, rank: int, offset: int) -> Iterator[tuple[int, int, int, Tensor]]:
        """Yield a put as a request to the owner's threads; its copy on the host is freed afterwards."""
        self._check(rank, offset, values)
        self.comm.traffic.sent(values.nbytes)
        with self._staging.host(values, write=False) as host:
            yield rank, self._served.number, offset, host

    def over_tcp(self, rank: int) -> bool:
        """Tell whether a put to that rank is a request over TCP."""
        return rank not in self._memory and self._bulk is self._served

    def _accumulate(self, values: Tensor, rank: int, offset: int) -> None:
        with self._staging.host(values, write=False) as host:
            if self._left_to(rank):
                self._served.accumulate(host, rank, offset)
            else:
                start = clock()
                self.add(host, rank, offset)
                self.comm.traffic.communicating_s += clock() - start
        if rank != self.comm.rank:
            self.comm.traffic.sent(values.nbytes)

    def add(self, values: Tensor, rank: int, offset: int) -> None:
        """Accumulate inside this node, from values on the host."""
        self._shared.add(values, self._node_rank[rank], offset)
        self.wake(rank)

    def change(self, function: Callable[..., object], rank: int, *beside: Tensor) -> bool:
        memory = self._at(rank, 0, self._check(rank, 0))
        if memory is None or self._left_to(rank) or not all(tensor.is_cpu for tensor in beside):
            return False
        target, start = self._node_rank[rank], clock()
        for parts in zip(*(tensor.split(_PIECE) for tensor in (memory, *beside)), strict=True):
            self._shared.lock(target)  # not for all of them, so that nobody waits for long
            try:
                function(*parts)
            finally:
                self._shared.unlock(target)
        self.wake(rank)
        self.comm.traffic.communicating_s += clock() - start
        if rank != self.comm.rank:
            self.comm.traffic.fetched(memory.nbytes)
            self.comm.traffic.sent(memory.nbytes)
        return True

    # --- atomics --------------------------------------------------------------------------------------------------
    def _atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        if self._left_to(rank):
            before = self._served.atomic(what, rank, offset, *values)
        else:
            start = clock()
            before = self.atomic(what, rank, offset, *values)
            self.comm.traffic.communicating_s += clock() - start
        if rank != self.comm.rank:
            self.comm.traffic.sent(8)
        return before

    def atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        """Make a `fetch_add` or `compare_and_swap` inside this node."""
        before = self._shared.atomic(what, self._node_rank[rank], offset, *values)
        self.wake(rank)
        return before

    def _left_to(self, owner: int) -> bool:
        """Tell whether only the owner's threads may add to its memory: on another node, or where ranks may die."""
        return owner not in self._memory or (self._tolerant and owner != self._own_rank)

    # --- waiting --------------------------------------------------------------------------------------------------
    def _wait(
        self,
        predicate: Callable[[Tensor], bool],
        rank: int,
        offset: int,
        count: int,
        what: str,
        deadline_s: float | None,
    ) -> None:
        here = self._at(rank, offset, count)
        seen = torch.empty(count, dtype=self.dtype) if here is None else here

        def ready() -> bool:
            if here is None:
                self._bulk.get(seen, rank, offset)
            else:
                self._shared.sync()
            return predicate(seen)

        sleep = partial(self._wakes.sleep, ready) if self._wakes is not None and rank == self.comm.rank else None
        self.comm.calls.await_until(ready, f"Window.wait for {what}", what, rank, deadline_s, sleep)

    def wake(self, rank: int) -> None:
        """Wake a rank of this node that sleeps until its memory changes, as it has just done."""
        if self._wakes is not None:
            self._wakes.wake(self._node_rank[rank])

    def close(self) -> None:
        self.comm.failures.retry_on_failure(self.comm.barrier)  # nobody may still be in a transfer
        for remote in {self._served, self._bulk} - {None}:
            remote.close()
        self._memory.clear()
        self._release()
        self._shared.close()

    def _at(self, rank: int, offset: int, count: int) -> Tensor | None:
        """Return a part of `rank`'s memory; None if it lies on another node."""
        memory = self._memory.get(rank)
        return None if memory is None else memory[offset : offset + count]


class AttachedMemory(Memory):
    """Memory that the ranks of one node already have: mapped by all of them, or read and written by the kernel.

    Args:
        comm: the MpiCommunicator.
        tensor: of this rank.
        addresses: of all ranks' tensors, each in its own process.
        mapped: all ranks' tensors as they lie in this process; none where they don't.
    """

    def __init__(self, comm, tensor: Tensor, addresses: list[int], mapped: list[Tensor]):
        super().__init__(tensor, [tensor.numel()] * comm.size)
        self.comm, self._addresses, self._parts = comm, addresses, mapped
        self._peers = [] if mapped else [PeerMemory(pid) for pid in comm.pids]

    def _get(self, out: Tensor, rank: int, offset: int) -> None:
        start = clock()
        if self._parts:
            out.copy_(self._parts[rank][offset : offset + out.numel()])
        else:
            self._peers[rank].read(out.data_ptr(), self._addresses[rank] + offset * out.itemsize, out.nbytes)
        self.comm.traffic.communicating_s += clock() - start
        self.comm.traffic.fetched(out.nbytes)

    def read(self, rank: int, offset: int, count: int, out: Tensor | None = None) -> Tensor:
        if not self._parts:
            return super().read(rank, offset, count, out)
        self._check(rank, offset, count=count)
        part = self._parts[rank][offset : offset + count]
        self.comm.traffic.fetched(part.nbytes)
        return part

    def _put(self, values: Tensor, rank: int, offset: int) -> None:
        start = clock()
        if self._parts:
            self._parts[rank][offset : offset + values.numel()].copy_(values)
        else:
            self._peers[rank].write(values.data_ptr(), self._addresses[rank] + offset * values.itemsize, values.nbytes)
        self.comm.traffic.communicating_s += clock() - start
        self.comm.traffic.sent(values.nbytes)

    accumulate = fetch_add = compare_and_swap = wait = refuse_attached

    def close(self) -> None:
        self._peers.clear()
        self._parts = []
