"""Windows of real ranks: shared memory inside a node; across nodes the faster transport by `comm/mpi/transports.py`.

Inside a node all ranks map each other's memory: `get` and `put` are plain copies without the owner's help. Atomic
operations hold a shared lock (`comm/mpi/node_memory.py`) inside a node, and are executed by the owner's threads across
nodes. If the job tolerates deaths, the owner's threads execute them inside a node, too: a rank that died while holding
a lock would never release it. The memory is then not MPI's either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.comm.mpi.calls import clock
from hpcdist.comm.mpi.messages import Staging, memory_at
from hpcdist.comm.mpi.node_memory import LockedMemory, MemfdMemory, NodeMemory
from hpcdist.comm.mpi.tcp import TcpTransfers
from hpcdist.comm.window import Predicate, Window


class MpiWindow(Window):
    """Collective. A window of `count` elements of `dtype`, all 0, on this rank.

    Args:
        comm: the MpiCommunicator.
        count: number of elements on this rank.
        transport: to other nodes, `tcp` or `rma`; by default the communicator's.
    """

    def __init__(self, comm: Any, count: int, dtype: torch.dtype, transport: str | None = None):
        self.comm, self._tolerant = comm, comm.failures.tolerant
        lengths = [n or 0 for n in comm.gather(int(count))]  # 0 for dead ranks
        if self._tolerant:
            self._shared: NodeMemory = MemfdMemory(comm, count * dtype.itemsize, dtype)
            self._sleep_memory: LockedMemory | None = None
        else:
            node, limit_s = comm.memory.node_mpi(), comm.failures.deadline_s
            self._shared = self._sleep_memory = LockedMemory(node, count * dtype.itemsize, dtype, limit_s)
        self._node_rank = {rank: i for i, rank in enumerate(comm.memory.local_ranks)}
        self._memory = {rank: self._shared.parts[i] for rank, i in self._node_rank.items()}
        super().__init__(self._memory[comm.rank], lengths, comm.rank, comm.traffic)
        self.local.zero_()
        self._staging = Staging()  # never device-aware: MPI may read addends with plain loads
        self._transfers: list[TcpTransfers | OneSided] = []
        self._remote: dict[int, TcpTransfers | OneSided] = {}  # gets and puts across nodes, by owner
        self._served: dict[int, TcpTransfers] = {}  # operations that only the owner's threads may execute, by owner
        remote_ranks = [rank for rank in range(comm.size) if rank not in self._memory]
        if remote_ranks or self._tolerant:
            served = comm.memory.server().expose(self)
            self._transfers.append(served)
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            self._served = dict.fromkeys(others if self._tolerant else remote_ranks, served)
            self._remote = dict.fromkeys(remote_ranks, served)
        if remote_ranks and (transport or comm.memory.choose()) == "rma":
            one_sided = OneSided(comm, self.local)
            self._transfers.append(one_sided)
            self._remote = dict.fromkeys(remote_ranks, one_sided)
            # A rank may sleep only if every change wakes it; changes by MPI's one-sided calls don't.
            self._sleep_memory = None
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
        """Yield the put as a request for `TcpServer.put_all`; if it does not go over TCP, put directly instead.

        A request is (rank, window number, offset, values on the host); use it before the next one is yielded.
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
        """Add values on the host to memory of a rank of this node."""
        self._shared.add(values, self._node_rank[rank], offset)
        self.wake(rank)

    def change(self, function: Callable[..., object], rank: int, *operands: Tensor) -> bool:
        self._check(rank, 0)
        if rank in self._served or not all(tensor.is_cpu for tensor in operands):
            return False
        memory, target = self._memory[rank], self._node_rank[rank]
        start = clock()
        for parts in alongside(memory, *operands):
            with self._shared.locks[target]:  # per chunk, so that no other rank waits for long
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
        """Execute a `fetch_add` or `compare_and_swap` inside this node; return the old value."""
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

        sleep = (
            partial(self._sleep_memory.sleep, ready) if self._sleep_memory is not None and rank == self._rank else None
        )
        known = by if remote is None else ()  # with `by`, the watchdog's thread would read the other node's memory
        self.comm.calls.await_until(ready, f"Window.wait for {what}", what, rank, limit_s, sleep, known)

    def wake(self, rank: int) -> None:
        """Wake a rank of this node if it sleeps in `wait`. Called after each change of its memory."""
        if self._sleep_memory is not None:
            self._sleep_memory.wake(self._node_rank[rank])

    def close(self) -> None:
        self.comm.failures.retry_on_failure(self.comm.barrier)  # no rank may still be in a transfer
        for transfers in self._transfers:
            transfers.close()
        self._memory.clear()
        self._release()
        self._shared.close()


class OneSided:
    """Collective. One window's `get` and `put` to and from ranks of other nodes, by MPI's one-sided calls.

    With network adapters that access remote memory (RDMA) the owner takes no part. Otherwise transfers progress only
    while the owner is inside MPI (MPI 4.1, 12.7.3), so a thread of the owner regularly calls MPI, at a small CPU cost.

    The memory already belongs to a shared window, and MPI (4.1, 12.2.1) does not specify concurrent calls on two
    windows over the same memory. Reads and writes of disjoint elements, which is all that is done here, work on every
    tested library; accumulates and atomics use only the shared window.

    Args:
        helped: start that thread.
    """

    def __init__(self, comm: Any, local: Tensor, *, helped: bool = True):
        self._comm = comm
        memory = memory_at(local.data_ptr(), local.nbytes) if local.nbytes else None
        self._win = MPI.Win.Create(memory, local.itemsize, comm=comm.mpi)
        self._win.Lock_all()
        self._progress = ExitStack()
        if helped:
            self._progress.enter_context(comm.process.progress.running())

    def get(self, out: Tensor, rank: int, offset: int) -> None:
        self._comm.calls.communicate("window get", rank, self._complete, self._win.Get, out, rank, offset)

    def put(self, values: Tensor, rank: int, offset: int) -> None:
        self._comm.calls.communicate("window put", rank, self._complete, self._win.Put, values, rank, offset)

    def _complete(self, call: Callable[..., None], tensor: Tensor, rank: int, offset: int) -> None:
        memory, *count_and_type = self._comm.staging.message(tensor)
        call([memory, *count_and_type], rank, [offset, *count_and_type])
        self._win.Flush(rank)

    def close(self) -> None:
        """Collective. Release MPI's window."""
        self._win.Unlock_all()
        self._win.Free()
        self._progress.close()
