"""Windows of real ranks: shared memory inside a node; across nodes the faster transport by `comm/mpi/transports.py`.

Inside a node every rank's memory is mapped by all: `get` and `put` are plain copies that need nobody's help. Atomic
operations are carried out there under a lock that the ranks share (`comm/mpi/node_memory.py`), and across nodes by
the owner's threads. Threads do so inside a node too where a rank's death is survived: a rank that died with the lock of
another's memory would keep it. There the memory is not MPI's either (`comm/mpi/node_memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import partial

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.comm.mpi.calls import clock
from hpcdist.comm.mpi.messages import Staging, memory_at
from hpcdist.comm.mpi.node_memory import LockedMemory, NodeMemory, OwnedMemory
from hpcdist.comm.mpi.tcp import TcpTransfers
from hpcdist.comm.window import Predicate, Window, check_count


class MpiWindow(Window):
    """Collective. A window over `count` zeroed elements of `dtype` on this rank.

    Args:
        comm: the MpiCommunicator.
        way: how other nodes are reached, instead of the communicator's own way.
    """

    def __init__(self, comm, count: int, dtype: torch.dtype, way: str | None = None):
        check_count(count)
        self.comm, self._tolerant = comm, comm.failures.tolerant
        lengths = [n or 0 for n in comm.gather(int(count))]
        if self._tolerant:
            self._shared: NodeMemory = OwnedMemory(comm, count * dtype.itemsize, dtype)
            self._wakes: LockedMemory | None = None
        else:
            node, limit_s = comm.memory.node_mpi(), comm.failures.deadline_s
            self._shared = self._wakes = LockedMemory(node, count * dtype.itemsize, dtype, limit_s)
        self._node_rank = {rank: i for i, rank in enumerate(comm.memory.local_ranks)}
        self._memory = {rank: self._shared.parts[i] for rank, i in self._node_rank.items()}
        super().__init__(self._memory[comm.rank], lengths, comm.rank, comm.traffic)
        self.local.zero_()
        self._staging = Staging()  # never device-aware: MPI may read what it adds with plain loads
        self._transfers: list[TcpTransfers | OneSided] = []
        self._remote: dict[int, TcpTransfers | OneSided] = {}  # gets and puts across nodes, by owner
        self._served: dict[int, TcpTransfers] = {}  # what only the owner's threads may do
        away = [rank for rank in range(comm.size) if rank not in self._memory]
        if away or self._tolerant:
            served = comm.memory.server().expose(self)
            self._transfers.append(served)
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            self._served = dict.fromkeys(others if self._tolerant else away, served)
            self._remote = dict.fromkeys(away, served)
        if away and (way or comm.memory.choose()) == "rma":
            one_sided = OneSided(comm, self.local)
            self._transfers.append(one_sided)
            self._remote = dict.fromkeys(away, one_sided)
            # A rank can be woken where it is told of all changes, which it is not of those that MPI makes one-sidedly.
            self._wakes = None
        comm.barrier()

    # --- transfers ------------------------------------------------------------------------------------------------
    def _get(self, out: Tensor, rank: int, offset: int) -> None:
        remote = self._remote.get(rank)
        if remote is not None:
            with self._staging.host(out, read=False) as host:
                remote.get(host, rank, offset)
        else:
            start = clock()
            self._shared.sync()
            out.copy_(self._memory[rank][offset : offset + out.numel()])
            self._traffic.communicating_s += clock() - start

    def _mapped(self, rank: int) -> Tensor | None:
        memory = None if rank in self._remote else self._memory.get(rank)
        if memory is not None:
            self._shared.sync()
        return memory

    def _put(self, values: Tensor, rank: int, offset: int) -> None:
        remote = self._remote.get(rank)
        if remote is not None:
            with self._staging.host(values, write=False) as host:
                remote.put(host, rank, offset)
        else:
            start = clock()
            self._memory[rank][offset : offset + values.numel()].copy_(values)
            self._shared.sync()
            self.wake(rank)
            self._traffic.communicating_s += clock() - start

    def requests(self, values: Tensor, rank: int, offset: int) -> Iterator[tuple[int, int, int, Tensor]]:
        """Put values; or yield, instead, the request to the owner's threads, where these make the put.

        Their copy on the host is freed afterwards.
        """
        remote = self._remote.get(rank)
        if isinstance(remote, TcpTransfers):
            self._check(rank, offset, values)
            self._traffic.sent(values.nbytes)
            with self._staging.host(values, write=False) as host:
                yield rank, remote.number, offset, host
        else:
            self.put(values, rank, offset)

    def _accumulate(self, values: Tensor, rank: int, offset: int) -> None:
        if not values.is_cpu:
            with self._staging.host(values, write=False) as host:
                return self._accumulate(host, rank, offset)
        served = self._served.get(rank)
        if served is not None:
            served.accumulate(values, rank, offset)
        else:
            start = clock()
            self.add(values, rank, offset)
            self._traffic.communicating_s += clock() - start

    def add(self, values: Tensor, rank: int, offset: int) -> None:
        """Accumulate inside this node, from values on the host."""
        self._shared.add(values, self._node_rank[rank], offset)
        self.wake(rank)

    def change(self, function: Callable[..., object], rank: int, *beside: Tensor) -> bool:
        self._check(rank, 0)
        if rank in self._served or not all(tensor.is_cpu for tensor in beside):
            return False
        memory, target = self._memory[rank], self._node_rank[rank]
        start = clock()
        for parts in alongside(memory, *beside):
            with self._shared.locks[target]:  # for one piece at a time, so that nobody waits for long
                function(*parts)
        self.wake(rank)
        self._traffic.communicating_s += clock() - start
        if rank != self._rank:
            self._traffic.fetched(memory.nbytes)
            self._traffic.sent(memory.nbytes)
        return True

    # --- atomics --------------------------------------------------------------------------------------------------
    def _atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        served = self._served.get(rank)
        if served is not None:
            return served.atomic(what, rank, offset, *values)
        start = clock()
        before = self.atomic(what, rank, offset, *values)
        self._traffic.communicating_s += clock() - start
        return before

    def atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        """Make a `fetch_add` or `compare_and_swap` inside this node."""
        before = self._shared.atomic(what, self._node_rank[rank], offset, *values)
        self.wake(rank)
        return before

    # --- waiting --------------------------------------------------------------------------------------------------
    def _wait(
        self, predicate: Predicate, rank: int, offset: int, count: int, what: str, limit_s: float | None,
        by: Collection[int],
    ) -> None:  # fmt: skip
        remote = self._remote.get(rank)
        elements = self.local.new_empty(count) if remote else self._memory[rank][offset : offset + count]

        def ready() -> bool:
            if remote is not None:
                remote.get(elements, rank, offset)
            else:
                self._shared.sync()
            return predicate(elements)

        sleep = partial(self._wakes.sleep, ready) if self._wakes is not None and rank == self._rank else None
        known = by if remote is None else ()  # another thread can't look there
        self.comm.calls.await_until(ready, f"Window.wait for {what}", what, rank, limit_s, sleep, known)

    def wake(self, rank: int) -> None:
        """Wake a rank of this node that sleeps until its memory changes, as it has just done."""
        if self._wakes is not None:
            self._wakes.wake(self._node_rank[rank])

    def close(self) -> None:
        self.comm.failures.retry_on_failure(self.comm.barrier)  # nobody may still be in a transfer
        for transfers in self._transfers:
            transfers.close()
        self._memory.clear()
        self._release()
        self._shared.close()


class OneSided:
    """Collective. Carry one window's `get` and `put` to and from ranks of other nodes by MPI's own one-sided calls.

    On a network whose adapters read remote memory themselves they need nobody's help. Elsewhere they progress only
    while the owner is inside MPI (MPI 4.1, 12.7.3), so a thread of the owner looks in now and then, which the owner
    pays for.

    The memory is that of a shared window already, and MPI (4.1, 12.2.1) leaves open what concurrent calls on two
    windows over the same memory do. Reads and writes of disjoint elements, which is all that goes this way, work on
    every library that is tested; accumulates and atomics stay with one window, the shared one.
    """

    def __init__(self, comm, local: Tensor):
        self._comm = comm
        memory = memory_at(local.data_ptr(), local.nbytes) if local.nbytes else None
        self._win = MPI.Win.Create(memory, local.itemsize, comm=comm.mpi)
        self._win.Lock_all()
        self._progress = ExitStack()
        self._progress.enter_context(comm.process.progress.running())

    def get(self, out: Tensor, rank: int, offset: int) -> None:
        self._comm.calls.communicate("window get", rank, self._complete, self._win.Get, out, rank, offset)

    def put(self, values: Tensor, rank: int, offset: int) -> None:
        self._comm.calls.communicate("window put", rank, self._complete, self._win.Put, values, rank, offset)

    def _complete(self, call: Callable[..., None], tensor: Tensor, rank: int, offset: int) -> None:
        memory, *counted = self._comm.staging.message(tensor)
        call([memory, *counted], rank, [offset, *counted])
        self._win.Flush(rank)

    def close(self) -> None:
        """Collective. Release MPI's window."""
        self._win.Unlock_all()
        self._win.Free()
        self._progress.close()
