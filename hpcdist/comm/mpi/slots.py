"""Slots of real ranks: memory of a node in which each rank shows the others what it brings to a collective call.

A call is made with reads and writes of memory alone: no system call, and no lock. The words that a rank alone writes
are a cache line of their own: how many calls it has come to, and a note of what it calls. Everyone looks at these of
all others. Whoever has to wait spins for a moment, for as long as ranks have cores of their
own; then it leaves its core to others, and at last it sleeps until a rank that comes wakes it.

The order in which other cores see writes is the program's on x86. Where the processor may change it (ARM, POWER), what
is written before is made visible by a lock that is taken and released twice: both are orderings in the C library.
"""

from __future__ import annotations

import os
import platform
import threading
from functools import partial

import torch

from hpcdist.comm.mpi.calls import EVERYONE
from hpcdist.comm.mpi.node_memory import Bell, map_parts
from hpcdist.comm.slots import GatheredRows, Slots
from hpcdist.records import local_cores_of_host

# Words of a rank, 8 bytes each: calls that it has come to, its notes of two calls in turn, whether it sleeps, and its
# semaphore. Those that others write are two cache lines away from those that it alone writes.
COUNT, NOTES, ASLEEP, SEMAPHORE, WORDS = 0, 1, 16, 24, 48
SPINS = 200  # looks at another rank's words, of 50 ns each, before a rank lets others have its core
YIELDS = 400  # times that it does so, of half a microsecond each where nobody wants the core, before it may sleep
ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


class NodeSlots(Slots):
    """Collective. The slots of a communicator whose ranks are on one node.

    Args:
        comm: the MpiCommunicator.
        n_bytes: of a slot.
        call: the name of the calls that are made with them, for messages.
    """

    def __init__(self, comm, n_bytes: int, call: str):
        size, head = comm.size, 8 * WORDS * comm.size
        (memory, *_) = map_parts(comm, head + 2 * size * n_bytes if comm.rank == 0 else 0)  # all of it is rank 0's
        every = torch.frombuffer(memory, dtype=torch.uint8)
        first, second = every[head:].view(2, size, n_bytes)
        super().__init__(comm.rank, (first, second))
        words = memoryview(memory).cast("B")[:head].cast("q")
        self._words = [words[rank * WORDS : (rank + 1) * WORDS] for rank in range(size)]
        self._own = self._words[comm.rank]
        self._others = [(rank, words) for rank, words in enumerate(self._words) if rank != comm.rank]
        places = (every.data_ptr() + 8 * (rank * WORDS + SEMAPHORE) for rank in range(size))
        self._bells = [Bell(place, words[ASLEEP : ASLEEP + 1]) for place, words in zip(places, self._words)]
        self._bells[comm.rank].create()
        self._comm, self._spins = comm, SPINS if _have_cores(comm) else 0
        self._lock, self._call = threading.Lock(), call
        comm.barrier()

    def synchronize(self, fingerprint: int, gathered: GatheredRows | None = None) -> bool:
        own, others, at, leave = self._own, self._others, NOTES + (self.calls & 1), os.sched_yield
        self.calls = now = self.calls + 1
        own[at] = fingerprint
        if not ORDERED:
            self._order()
        own[COUNT] = now
        for rank, words in others:
            if words[ASLEEP]:
                self._bells[rank].wake()
        agree = True
        for _, words in others:
            spins = self._spins
            while words[COUNT] < now:
                spins -= 1
                if spins < 0:
                    leave()
                    if spins < -YIELDS:
                        self._wait(now)
                        break
            if words[at] != fingerprint:
                agree = False
        if not ORDERED:
            self._order()
        return agree

    # --- waiting --------------------------------------------------------------------------------------------------
    def _wait(self, now: int) -> None:
        """Wait until all ranks have come to this call."""
        comm = self._comm

        def ready() -> bool:
            return all(words[COUNT] >= now for _, words in self._others)

        if missing := [rank for rank, words in self._others if words[COUNT] < now]:
            what = f"rank {', '.join(map(str, missing))} to come to the {self._call} on {comm.name}"
            sleep = partial(self._bells[self.rank].sleep, ready)
            comm.calls.await_until(ready, self._call, what, EVERYONE, sleep=sleep)

    def _order(self) -> None:
        """Make what was written before visible to whoever sees what is written after, and the same for reads."""
        for _ in range(2):
            with self._lock:
                pass

    def close(self) -> None:
        super().close()
        for held in (self._words, self._others, self._bells):
            held.clear()


def _have_cores(comm) -> bool:
    """Collective. Tell whether all of the job's ranks on this node have a core of their own."""
    cores = {core for _, found in comm.gather(local_cores_of_host()) for core in found}
    world = comm.process.world or comm
    return len(world.memory.local_ranks) <= len(cores)
