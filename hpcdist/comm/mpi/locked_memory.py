"""MPI's shared memory of a node, with atomic operations of our own that need no help of MPI or of the owner.

MPI leaves open who carries out an atomic on a shared window. MPICH 4.0 sends it to the owner, which gets to it once it
calls MPI: 2 ms where the owner waits, and longer where it computes. All ranks of the node have the memory mapped, so
here each does it itself, while it holds a lock that lies in the owner's memory.

A rank that waits for a change of its own memory sleeps on a semaphore there, and whoever makes the change wakes it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdist.errors import DeadlineError

LINE = 64  # bytes of a cache line; more than a lock, or a semaphore, takes on any platform
_SHARED = 1  # PTHREAD_PROCESS_SHARED, and a semaphore's
_HALF = 1 << 63
_LONGEST_S = 1e9

# The GIL is kept in calls that return at once: to take it again, a thread may have to wait for 5 ms.
_libc = ctypes.CDLL(None)
_try_lock, _unlock = (getattr(ctypes.PyDLL(None), f"pthread_mutex_{name}") for name in ("trylock", "unlock"))
_post = ctypes.PyDLL(None).sem_post


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class LockedMemory:
    """Collective. A window inside a node with the methods of MPI.Win, and atomics of its own.

    Args:
        node: MPI's communicator of the ranks of this node.
        n_bytes: of this rank.
        deadline_s: how long a rank may wait for a lock. It is held for as long as an addition takes.
    """

    def __init__(self, node: MPI.Intracomm, n_bytes: int, deadline_s: float):
        self._deadline_s = deadline_s
        self._mine = threading.Lock()  # threads of one process wait for each other here, without a core
        self._win = MPI.Win.Allocate_shared(n_bytes + 4 * LINE, 1, comm=node)
        self.Lock_all, self.Unlock_all, self.Sync = self._win.Lock_all, self._win.Unlock_all, self._win.Sync
        self._parts, self._locks, self._semaphores, self._asleep = [], [], [], []
        for rank, length in enumerate(node.allgather(n_bytes)):
            memory, _ = self._win.Shared_query(rank)
            first = -memory.address % LINE  # the same in all processes: what is mapped begins at a page
            self._locks.append(ctypes.c_void_p(memory.address + first))
            self._semaphores.append(ctypes.c_void_p(memory.address + first + LINE))
            self._asleep.append(_words(memory[first + 2 * LINE : first + 3 * LINE]))
            self._parts.append(memory[first + 3 * LINE : first + 3 * LINE + length])
        self._words = [_words(part) for part in self._parts]
        self._typed: list[np.ndarray | None] = [None] * len(self._parts)
        self._rank = node.Get_rank()
        _make_lock(self._locks[self._rank])
        _libc.sem_init(self._semaphores[self._rank], _SHARED, 0)
        self._asleep[self._rank][0] = 0
        node.Barrier()

    def Shared_query(self, node_rank: int) -> tuple[MPI.memory, int]:
        return self._parts[node_rank], 1

    def Flush(self, target: int) -> None:
        pass

    def Free(self) -> None:
        """Collective. Free the memory."""
        self._asleep.clear()
        self._typed.clear()
        self._words.clear()
        self._parts.clear()
        self._win.Free()

    def Accumulate(self, values: Sequence, target: int, place: Sequence) -> None:
        (memory, count, kind), first = values, place[0]
        if self._typed[target] is None:  # a window has elements of one type
            self._typed[target] = np.frombuffer(self._parts[target], kind.typestr)
        elements = self._typed[target][first : first + count]
        added = np.frombuffer(memory, elements.dtype)
        self.lock(target)
        try:
            np.add(elements, added, out=elements)
        finally:
            self.unlock(target)

    def Fetch_and_op(self, value: np.ndarray, before: np.ndarray, target: int, offset: int, op: MPI.Op) -> None:
        """Add to one element, for any `op`, and write its former value into `before`."""
        words, added = self._words[target], int(value[0])
        self.lock(target)
        try:
            former = words[offset]
            words[offset] = (former + added + _HALF) % (2 * _HALF) - _HALF  # it wraps around
        finally:
            self.unlock(target)
        before[0] = former

    def Compare_and_swap(
        self, value: np.ndarray, expected: np.ndarray, before: np.ndarray, target: int, offset: int
    ) -> None:
        words, wanted, new = self._words[target], int(expected[0]), int(value[0])
        self.lock(target)
        try:
            former = words[offset]
            if former == wanted:
                words[offset] = new
        finally:
            self.unlock(target)
        before[0] = former

    def sleep(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Sleep for so long unless `ready()`, or until `wake` is called for this rank; tell whether that was so."""
        asleep = self._asleep[self._rank]
        asleep[0] = 1  # before the last look: who changes what this looks at sees it
        try:
            return ready() or not _libc.sem_timedwait(self._semaphores[self._rank], _in(seconds))
        finally:
            asleep[0] = 0

    def wake(self, target: int) -> None:
        """Wake a rank that sleeps, after a change of its memory."""
        asleep = self._asleep[target]
        if asleep[0]:
            asleep[0] = 0
            _post(self._semaphores[target])

    def lock(self, target: int) -> None:
        """Keep other threads, and the node's other ranks, from changing the target's memory atomically."""
        self._mine.acquire()
        lock = self._locks[target]
        if _try_lock(lock) and not self._comes_free(lock):
            self._mine.release()
            raise DeadlineError(
                f"the lock of a window on rank {target} of this node did not come free within {self._deadline_s:g} s. "
                "The rank that has it is stopped, or has died: see what it said last."
            )

    def unlock(self, target: int) -> None:
        _unlock(self._locks[target])
        self._mine.release()

    def _comes_free(self, lock: ctypes.c_void_p) -> bool:
        return not _libc.pthread_mutex_timedlock(lock, _in(min(self._deadline_s, _LONGEST_S)))


def _in(seconds: float) -> Any:
    """Return the time after so many seconds, as libc takes it."""
    until = time.time() + seconds
    return ctypes.byref(_Time(int(until), int(until % 1 * 1e9)))


def _words(part: MPI.memory) -> memoryview:
    """View the memory as int64."""
    whole = len(part) // 8 * 8
    return memoryview(part[:whole]).cast("B").cast("q") if whole else memoryview(b"")


def _make_lock(place: ctypes.c_void_p) -> None:
    """Make a lock that processes share, in place."""
    kind = ctypes.create_string_buffer(LINE)
    _libc.pthread_mutexattr_init(kind)
    _libc.pthread_mutexattr_setpshared(kind, _SHARED)
    _libc.pthread_mutex_init(place, kind)
