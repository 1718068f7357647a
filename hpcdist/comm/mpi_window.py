"""Windows of real ranks: shared memory inside a node, the owner's agent (`comm/mpi_agent.py`) across nodes.

Inside a node every rank's memory is mapped by all: `get` and `put` are plain copies that need nobody's help. Atomic
operations are MPI's own on the same memory. Across nodes MPI's one-sided calls progress only while the owner is
inside MPI, so the request goes to a thread of the owner's instead.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.communicator import Window, check_flat
from hpcdist.comm.cross_memory import PeerMemory
from hpcdist.comm.mpi_buffers import NUMBERS, numbers
from hpcdist.comm.waiting import wait_until
from hpcdist.errors import CommunicationError


class MpiWindow(Window):
    """Collective. A window over `count` zeroed elements of `dtype` on this rank."""

    def __init__(self, comm, count: int, dtype: torch.dtype):
        if count < 0:
            raise CommunicationError(f"count of a window must be at least 0; got {count}.")
        self.comm, self.dtype = comm, dtype
        node = comm.node_mpi()
        itemsize = torch.empty(0, dtype=dtype).itemsize
        self.counts = [int(n) for n in comm.exchange(str(count).encode())]
        self._shared = MPI.Win.Allocate_shared(count * itemsize, itemsize, comm=node)
        self._locks = MPI.Win.Allocate_shared(8, 8, comm=node)  # one word per rank: see _accumulate_locked
        ranks = [r for r in range(comm.size) if comm.nodes[r] == comm.nodes[comm.rank]]
        self._node_rank = {rank: i for i, rank in enumerate(ranks)}
        self._memory = {rank: _mapped(self._shared, i, dtype) for rank, i in self._node_rank.items()}
        self.local = self._memory[comm.rank]
        self.local.zero_()
        Tensor.zero_(_mapped(self._locks, self._node_rank[comm.rank], torch.int64))
        self._shared.Lock_all()
        self._locks.Lock_all()
        self._agent = comm.agent() if len(ranks) < comm.size else None
        if self._agent is not None:
            self._id = self._agent.expose(self)
        comm.barrier()

    # --- transfers ------------------------------------------------------------------------------------------------
    def get(self, out: Tensor, rank: int, offset: int = 0) -> None:
        memory = self._at(rank, offset, out)
        start = self.comm.now()
        if memory is None:
            with self.comm.staging.host(out, read=False) as host:
                self._agent.get(self._id, host, rank, offset)
        else:
            self._shared.Sync()
            out.copy_(memory)
        if rank != self.comm.rank:
            self.comm.traffic.fetched(out.nbytes)
        self.comm.traffic.communicating_s += self.comm.now() - start

    def put(self, values: Tensor, rank: int, offset: int = 0) -> None:
        self._change(values, rank, offset, "put", self.store)

    def accumulate(self, values: Tensor, rank: int, offset: int = 0) -> None:
        self._change(values, rank, offset, "accumulate", self.add)

    def _change(self, values: Tensor, rank: int, offset: int, what: str, here: Callable) -> None:
        memory = self._at(rank, offset, values)
        start = self.comm.now()
        if memory is None:
            with self.comm.staging.host(values, write=False) as host:
                getattr(self._agent, what)(self._id, host, rank, offset)
        else:
            here(values, rank, offset)
        if rank != self.comm.rank:
            self.comm.traffic.sent(values.nbytes)
        self.comm.traffic.communicating_s += self.comm.now() - start

    def store(self, values: Tensor, rank: int, offset: int) -> None:
        """`put` on this node."""
        self._memory[rank][offset : offset + values.numel()].copy_(values)
        self._shared.Sync()

    def add(self, values: Tensor, rank: int, offset: int) -> None:
        """`accumulate` on this node."""
        if values.dtype in NUMBERS and values.is_cpu:
            target = self._node_rank[rank]
            self._shared.Accumulate(numbers(values), target, [offset, values.numel(), NUMBERS[values.dtype]])
            self._shared.Flush(target)
        else:
            self._accumulate_locked(values, rank, offset)

    def _accumulate_locked(self, values: Tensor, rank: int, offset: int) -> None:
        # MPI can't add 16-bit floats, so these exclude each other by the owner's lock word.
        one, zero, seen = np.ones(1, np.int64), np.zeros(1, np.int64), np.empty(1, np.int64)
        target = self._node_rank[rank]

        def locked() -> bool:
            self._locks.Compare_and_swap(one, zero, seen, target, 0)
            self._locks.Flush(target)
            return seen[0] == 0

        wait_until(locked, self.comm.deadline_s, lambda: f"the lock of rank {rank}'s window")
        self._shared.Sync()
        self._memory[rank][offset : offset + values.numel()].add_(values)
        self._shared.Sync()
        self._locks.Accumulate(zero, target, op=MPI.REPLACE)
        self._locks.Flush(target)

    # --- atomics --------------------------------------------------------------------------------------------------
    def fetch_add(self, value: int, rank: int, offset: int = 0) -> int:
        return self._atomic("fetch_add", rank, offset, value)

    def compare_and_swap(self, expected: int, desired: int, rank: int, offset: int = 0) -> int:
        return self._atomic("compare_and_swap", rank, offset, expected, desired)

    def _atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        if self.dtype != torch.int64:
            raise CommunicationError(f"{what} must be used on an int64 window; got a window of {self.dtype}.")
        if self._at(rank, offset, None) is None:
            found = self._agent.atomic(self._id, what, rank, offset, *values)
        else:
            found = self.atomic(what, rank, offset, *values)
        if rank != self.comm.rank:
            self.comm.traffic.sent(8)
        return found

    def atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        """`fetch_add` or `compare_and_swap` on this node."""
        target, before = self._node_rank[rank], np.empty(1, np.int64)
        words = [np.array([v], np.int64) for v in values]
        if what == "fetch_add":
            self._shared.Fetch_and_op(words[0], before, target, offset, MPI.SUM)
        else:
            self._shared.Compare_and_swap(words[1], words[0], before, target, offset)
        self._shared.Flush(target)
        return int(before[0])

    # --- waiting --------------------------------------------------------------------------------------------------
    def wait(
        self,
        predicate: Callable[[Tensor], bool],
        *,
        rank: int | None = None,
        offset: int = 0,
        count: int | None = None,
        what: str = "a change in a window",
        deadline_s: float | None = None,
    ) -> None:
        rank = self.comm.rank if rank is None else rank
        if rank in self._memory:
            stop = None if count is None else offset + count
            seen, refresh = self._memory[rank][offset:stop], self._shared.Sync
        else:
            count = self.counts[rank] - offset if count is None else count
            seen = torch.empty(count, dtype=self.dtype)

            def refresh() -> None:
                self._agent.get(self._id, seen, rank, offset)

        def ready() -> bool:
            refresh()
            return predicate(seen)

        deadline_s = self.comm.deadline_s if deadline_s is None else deadline_s
        self.comm.traffic.waiting_s += wait_until(ready, deadline_s, lambda: f"rank {self.comm.rank}: {what}")

    def close(self) -> None:
        self.comm.barrier()  # nobody may still be in a transfer
        if self._agent is not None:
            self._agent.withdraw(self._id)
        self._memory.clear()
        del self.local
        for win in (self._shared, self._locks):
            win.Unlock_all()
            win.Free()

    def _at(self, rank: int, offset: int, tensor: Tensor | None) -> Tensor | None:
        """The part of `rank`'s memory that a call means; None if it lies on another node."""
        self.comm.check_peer(rank, "rank of a window")
        count = 1
        if tensor is not None:
            check_flat(tensor)
            count = tensor.numel()
            if tensor.dtype != self.dtype:
                raise CommunicationError(f"dtype must be that of the window, {self.dtype}; got {tensor.dtype}.")
        if offset < 0 or offset + count > self.counts[rank]:
            raise CommunicationError(out_of_range(rank, self.counts[rank], offset, count))
        memory = self._memory.get(rank)
        return None if memory is None else memory[offset : offset + count]


class AttachedWindow(Window):
    """Memory that the ranks of one node already have, read and written by cross-memory attach. `get` and `put`."""

    def __init__(self, comm, tensor: Tensor, addresses: list[int]):
        self.comm, self.local, self._addresses = comm, tensor, addresses
        self._peers = [PeerMemory(pid) for pid in comm.pids]

    def get(self, out: Tensor, rank: int, offset: int = 0) -> None:
        self._transfer(self._peers[rank].read, out, rank, offset)
        self.comm.traffic.fetched(out.nbytes)

    def put(self, values: Tensor, rank: int, offset: int = 0) -> None:
        self._transfer(self._peers[rank].write, values, rank, offset)
        self.comm.traffic.sent(values.nbytes)

    def _transfer(self, call: Callable, tensor: Tensor, rank: int, offset: int) -> None:
        itemsize, n_bytes = tensor.itemsize, tensor.nbytes
        if offset < 0 or offset * itemsize + n_bytes > self.local.nbytes:
            raise CommunicationError(out_of_range(rank, self.local.numel(), offset, tensor.numel()))
        start = self.comm.now()
        call(tensor.data_ptr(), self._addresses[rank] + offset * itemsize, n_bytes)
        self.comm.traffic.communicating_s += self.comm.now() - start

    def _refuse(self, *args, **options):
        raise CommunicationError("an attached window must be used for get and put only. Make one with comm.window.")

    accumulate = fetch_add = compare_and_swap = wait = _refuse

    def close(self) -> None:
        self._peers.clear()


def out_of_range(rank: int, length: int, offset: int, count: int) -> str:
    return (
        f"elements of a window call must lie within rank {rank}'s {length} elements; "
        f"got [{offset}, {offset + count})."
    )


def _mapped(win: MPI.Win, node_rank: int, dtype: torch.dtype) -> Tensor:
    memory, _ = win.Shared_query(node_rank)
    if memory.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype)
