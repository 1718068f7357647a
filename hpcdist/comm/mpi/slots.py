"""Slots of real ranks: shared memory of a node in which each rank publishes its input to a collective call.

A call only reads and writes memory: no system call, and no lock. Each rank has a header in shared memory: its number of
calls, and the fingerprint of its call, in a cache line that only this rank writes and all others read. A rank that has
to wait first spins, if each rank has a separate core; then yields its core; and finally sleeps until a rank that
arrives wakes it.

On x86 other cores see writes in program order. On processors that may reorder them (ARM, POWER), a lock that is
acquired and released twice orders them: the C library's lock functions are memory barriers.
"""

from __future__ import annotations

import os
import platform
import threading
from functools import partial
from typing import Any

import torch

from hpcdist.comm.mpi.calls import ALL_RANKS
from hpcdist.comm.mpi.node_memory import WakeUp, map_parts
from hpcdist.comm.slots import GatheredRows, Slots
from hpcdist.records import local_cores_of_host

# Positions in a rank's header, in int64: number of calls, fingerprints of two calls in turn, whether it sleeps, its
# semaphore. Fields that other ranks write are two cache lines away from the fields that only this rank writes.
COUNT, FINGERPRINTS, ASLEEP, SEMAPHORE, LENGTH = 0, 1, 16, 24, 48
SPINS = 200  # checks of another rank's header, 50 ns each, before a rank yields its core
YIELDS = 400  # yields, half a microsecond each if no other process needs the core, before it sleeps
ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


class NodeSlots(Slots):
    """Collective. The slots of a communicator whose ranks are on one node.

    Args:
        comm: the MpiCommunicator.
        n_bytes: size of a slot.
        call: name of the calls that use the slots, for messages.
    """

    def __init__(self, comm: Any, n_bytes: int, call: str):
        size, header_bytes = comm.size, 8 * LENGTH * comm.size
        (memory, *_) = map_parts(comm, header_bytes + 2 * size * n_bytes if comm.rank == 0 else 0)  # rank 0's holds all
        all_bytes = torch.frombuffer(memory, dtype=torch.uint8)
        first, second = all_bytes[header_bytes:].view(2, size, n_bytes)
        super().__init__(comm.rank, (first, second))
        header_fields = memoryview(memory).cast("B")[:header_bytes].cast("q")
        self._headers = [header_fields[rank * LENGTH : (rank + 1) * LENGTH] for rank in range(size)]
        self._header = self._headers[comm.rank]
        self._others = [(rank, header) for rank, header in enumerate(self._headers) if rank != comm.rank]
        addresses = (all_bytes.data_ptr() + 8 * (rank * LENGTH + SEMAPHORE) for rank in range(size))
        self._wake_ups = [
            WakeUp(address, header[ASLEEP : ASLEEP + 1]) for address, header in zip(addresses, self._headers)
        ]
        self._wake_ups[comm.rank].create()
        self._comm, self._spins = comm, SPINS if _have_cores(comm) else 0
        self._lock, self._call = threading.Lock(), call
        comm.barrier()

    def synchronize(self, fingerprint: int, gathered: GatheredRows | None = None) -> bool:
        header, others, field, yield_core = self._header, self._others, FINGERPRINTS + (self.calls & 1), os.sched_yield
        self.calls = now = self.calls + 1
        header[field] = fingerprint
        if not ORDERED:
            self._order()
        header[COUNT] = now  # after the row and the fingerprint: from here on other ranks read these
        for rank, other in others:
            if other[ASLEEP]:
                self._wake_ups[rank].wake()
        equal = True
        for _, other in others:
            spins = self._spins
            while other[COUNT] < now:
                spins -= 1  # below 0 it counts yields
                if spins < 0:
                    yield_core()
                    if spins < -YIELDS:
                        self._wait(now)  # for all ranks, so this one has arrived, too
                        break
            if other[field] != fingerprint:
                equal = False
        if not ORDERED:
            self._order()
        return equal

    # --- waiting --------------------------------------------------------------------------------------------------
    def _wait(self, now: int) -> None:
        """Sleep until all ranks have called this."""
        comm = self._comm

        def ready() -> bool:
            return all(header[COUNT] >= now for _, header in self._others)

        if missing := [rank for rank, header in self._others if header[COUNT] < now]:
            what = f"rank {', '.join(map(str, missing))} to come to the {self._call} on {comm.name}"
            sleep = partial(self._wake_ups[self.rank].sleep, ready)
            comm.calls.await_until(ready, self._call, what, ALL_RANKS, sleep=sleep)

    def _order(self) -> None:
        """Memory barrier: order reads and writes before it before those after it."""
        for _ in range(2):
            with self._lock:
                pass

    def close(self) -> None:
        super().close()
        for held in (self._headers, self._others, self._wake_ups):
            held.clear()


def _have_cores(comm: Any) -> bool:
    """Collective. Return whether there are at least as many cores as ranks of the job on this node."""
    cores = {core for _, usable in comm.gather(local_cores_of_host()) for core in usable}
    world = comm.process.world or comm
    return len(world.memory.local_ranks) <= len(cores)
