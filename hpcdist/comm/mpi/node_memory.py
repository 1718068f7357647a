"""Memory that the ranks of a node share, with atomic operations that need no help of MPI or of the owner.

`LockedMemory` is MPI's shared memory. MPI leaves open who carries out an atomic on a shared window. MPICH 4.0 sends it
to the owner, which gets to it once it calls MPI: 2 ms where the owner waits, and longer where it computes. All ranks of
the node have the memory mapped, so here each does it itself, while it holds a lock that lies in the owner's memory. A
rank that waits for a change of its own memory sleeps on a semaphore there, and whoever makes the change wakes it.

`OwnedMemory` is memory without MPI: where ranks may die, and for tensors that they sum in place. Open MPI warns at
every start that its own windows are not tested with deaths. Here the kernel keeps a file without a name for each rank,
which the others map through its process; it is gone with the last of them, and no limit of /dev/shm holds for it.
"""

from __future__ import annotations

import abc
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.mpi.messages import NUMBERS
from hpcdist.comm.window import atomic
from hpcdist.errors import CommunicationError, DeadlineError


class NodeMemory(abc.ABC):
    """The memory of a node's ranks, mapped by all of them, and atomic operations under a lock for each rank's memory.

    Ranks are named by their numbers in the node.

    Args:
        parts: the memory of each rank.
        locks: by rank. Inside the context of one no other thread changes that rank's memory, nor do other ranks where
            they change it too.
        dtype: of its elements.
    """

    def __init__(self, parts: Sequence[Any], locks: Sequence[AbstractContextManager[Any]], dtype: torch.dtype):
        self.locks = locks
        self.parts = [
            torch.frombuffer(part, dtype=dtype) if len(part) else torch.empty(0, dtype=dtype) for part in parts
        ]
        # numpy adds a few elements in half of torch's time, but not 16-bit floats; Python's integers take a tenth.
        self._arrays = [part.numpy() for part in self.parts] if dtype in NUMBERS else []
        self._words = [_words(part) for part in parts] if dtype == torch.int64 else []

    def add(self, values: Tensor, target: int, first: int) -> None:
        """Add values on the host to a rank's elements, from `first` on."""
        stop = first + len(values)
        with self.locks[target]:
            if self._arrays:
                elements = self._arrays[target][first:stop]
                np.add(elements, values.detach().numpy(), out=elements)
            else:
                self.parts[target][first:stop].add_(values.detach())

    def atomic(self, what: str, target: int, offset: int, *values: int) -> int:
        """Make a `fetch_add` or `compare_and_swap` (expected, desired) of one element; return its former value."""
        words = self._words[target]
        with self.locks[target]:
            before = words[offset]
            words[offset] = atomic(what, before, *values)
        return before

    @abc.abstractmethod
    def sync(self) -> None:
        """Make what was written before visible to whoever reads after."""

    def close(self) -> None:
        """Forget the memory. Collective for `LockedMemory`."""
        for views in (self.parts, self._arrays, self._words):
            views.clear()


class OwnedMemory(NodeMemory):
    """Collective among the surviving ranks. Memory without MPI, which only its owner's threads change atomically.

    Args:
        comm: the MpiCommunicator; what is mapped is the memory of the ranks of this rank's node.
        n_bytes: of this rank.
        dtype: of an element.
    """

    def __init__(self, comm, n_bytes: int, dtype: torch.dtype):
        parts = map_parts(comm, n_bytes)
        self._fence = threading.Lock()
        super().__init__(parts, [threading.Lock() for _ in parts], dtype)

    def sync(self) -> None:
        with self._fence:
            pass


def map_parts(comm, n_bytes: int) -> list[mmap.mmap | memoryview]:
    """Collective among the surviving ranks. Make zeroed memory, and map that of all ranks of this rank's node, in their
    order.

    Args:
        comm: the MpiCommunicator.
        n_bytes: of this rank.

    Raises:
        CommunicationError: a rank can't make its memory, or map another's.
    """
    own = comm.raise_on_all_ranks(lambda: _made(n_bytes))
    try:
        files = comm.gather([own, n_bytes])
        ranks = comm.memory.local_ranks
        return comm.raise_on_all_ranks(lambda: [_mapped(comm, rank, files[rank] or [0, 0], own) for rank in ranks])
    finally:
        os.close(own)


def _made(n_bytes: int) -> int:
    """Make a file without a name, of so many zeros; return its number."""
    file = os.memfd_create("hpcdist-window")
    try:
        if n_bytes:
            os.posix_fallocate(file, 0, n_bytes)
    except OSError as error:
        os.close(file)
        raise CommunicationError(f"{n_bytes} bytes of memory to share must be available; {error.strerror}.") from error
    return file


def _mapped(comm, rank: int, file_of: Sequence[int], own: int) -> mmap.mmap | memoryview:
    """Map the memory of a rank of this node, a file of its process; nothing of a rank that has died."""
    file, n_bytes = file_of
    if not n_bytes:
        return memoryview(b"")
    if rank == comm.rank:
        return mmap.mmap(own, n_bytes)
    path = f"/proc/{comm.pids[rank]}/fd/{file}"
    try:
        theirs = os.open(path, os.O_RDWR)
    except OSError as error:
        raise CommunicationError(
            f"rank {comm.rank} can't map the memory of rank {rank}, which is on the same node ({error}). Start all "
            "ranks of a node in one container, or without --with-ft ulfm."
        ) from error
    try:
        return mmap.mmap(theirs, n_bytes)
    finally:
        os.close(theirs)


class SharedTensor:
    """Collective. Zeroed memory of this rank that the other ranks have mapped, all of them on one node.

    Args:
        comm: the MpiCommunicator.
        count: of elements, the same on all ranks.
        dtype: of an element.

    Attributes:
        local: this rank's memory, shape (count,).

    Raises:
        CommunicationError: on all ranks, where one can't make its memory, or map another's.
    """

    def __init__(self, comm, count: int, dtype: torch.dtype):
        n_bytes = count * dtype.itemsize
        self._parts = [torch.frombuffer(part, dtype=torch.uint8) for part in map_parts(comm, n_bytes)]
        self._first, self._end = self._parts[comm.rank].data_ptr(), self._parts[comm.rank].data_ptr() + n_bytes
        self.local = self._parts[comm.rank].view(dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies within this rank's memory."""
        return self._first <= tensor.data_ptr() < self._end

    def beside(self, tensor: Tensor) -> list[Tensor]:
        """View the part of each rank's memory that lies where a flat tensor lies in this rank's; by rank."""
        start = tensor.data_ptr() - self._first
        return [part[start : start + tensor.nbytes].view(tensor.dtype) for part in self._parts]


LINE = 64  # bytes of a cache line; more than a lock, or a semaphore, takes on any platform
_SHARED = 1  # PTHREAD_PROCESS_SHARED, and a semaphore's
_LONGEST_S = 1e9

# The GIL is kept in calls that return at once: to take it again, a thread may have to wait for 5 ms.
_libc = ctypes.CDLL(None)
_try_lock, _unlock = (getattr(ctypes.PyDLL(None), f"pthread_mutex_{name}") for name in ("trylock", "unlock"))
_post = ctypes.PyDLL(None).sem_post


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _SharedLock:
    """A lock that the processes of a node share, in the memory of one rank; `make` makes it there."""

    def __init__(self, rank: int, address: int, deadline_s: float):
        self._rank, self._place, self._deadline_s = rank, ctypes.c_void_p(address), deadline_s
        self._mine = threading.Lock()  # threads of one process wait for each other here, without a core

    def create(self) -> None:
        kind = ctypes.create_string_buffer(LINE)
        _libc.pthread_mutexattr_init(kind)
        _libc.pthread_mutexattr_setpshared(kind, _SHARED)
        _libc.pthread_mutex_init(self._place, kind)

    def __enter__(self) -> None:
        self._mine.acquire()
        if _try_lock(self._place) and _libc.pthread_mutex_timedlock(
            self._place, _in(min(self._deadline_s, _LONGEST_S))
        ):
            self._mine.release()
            raise DeadlineError(
                f"the lock of a window on rank {self._rank} of this node did not come free within "
                f"{self._deadline_s:g} s. The rank that has it is stopped, or has died: see what it said last."
            )

    def __exit__(self, *raised: object) -> None:
        _unlock(self._place)
        self._mine.release()


class Bell:
    """Wakes a rank that sleeps until its memory changes, or another rank's. It lies in memory that the ranks share.

    Args:
        semaphore: its address, of at least 32 bytes.
        asleep: a word that says whether the rank sleeps.
    """

    def __init__(self, semaphore: int, asleep: memoryview):
        self._semaphore, self.asleep = ctypes.c_void_p(semaphore), asleep

    def create(self) -> None:
        """Make it there, before anyone uses it: a call of the rank that is to be woken."""
        _libc.sem_init(self._semaphore, _SHARED, 0)
        self.asleep[0] = 0

    def sleep(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Sleep for so long unless `ready()`, or until `wake` is called; tell whether that was so."""
        self.asleep[0] = 1  # before the last look: who changes what this looks at sees it
        try:
            return ready() or not _libc.sem_timedwait(self._semaphore, _in(seconds))
        finally:
            self.asleep[0] = 0

    def wake(self) -> None:
        """Wake the rank if it sleeps, after a change of what it looks at."""
        if self.asleep[0]:
            self.asleep[0] = 0
            _post(self._semaphore)


class LockedMemory(NodeMemory):
    """Collective. MPI's shared memory, of which any rank of the node changes any part, under locks that they share.

    Args:
        node: MPI's communicator of the ranks of this node.
        n_bytes: of this rank.
        dtype: of an element.
        deadline_s: how long a rank may wait for a lock. It is held for as long as an addition takes.
    """

    def __init__(self, node: MPI.Intracomm, n_bytes: int, dtype: torch.dtype, deadline_s: float):
        self._win = MPI.Win.Allocate_shared(n_bytes + 4 * LINE, 1, comm=node)
        self._win.Lock_all()
        parts, locks, self._bells = [], [], []
        for rank, length in enumerate(node.allgather(n_bytes)):
            memory, _ = self._win.Shared_query(rank)
            first = -memory.address % LINE  # the same in all processes: what is mapped begins at a page
            locks.append(_SharedLock(rank, memory.address + first, deadline_s))
            asleep = _words(memory[first + 2 * LINE : first + 3 * LINE])
            self._bells.append(Bell(memory.address + first + LINE, asleep))
            parts.append(memory[first + 3 * LINE : first + 3 * LINE + length])
        super().__init__(parts, locks, dtype)
        self._rank = node.Get_rank()
        locks[self._rank].create()
        self._bells[self._rank].create()
        node.Barrier()

    def sync(self) -> None:
        self._win.Sync()

    def close(self) -> None:
        super().close()
        self._bells.clear()
        self._win.Unlock_all()
        self._win.Free()

    def sleep(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Sleep for so long unless `ready()`, or until `wake` is called for this rank; tell whether that was so."""
        return self._bells[self._rank].sleep(ready, seconds)

    def wake(self, target: int) -> None:
        """Wake a rank that sleeps, after a change of its memory."""
        self._bells[target].wake()


def _in(seconds: float) -> Any:
    """Return the time after so many seconds, as libc takes it."""
    until = time.time() + seconds
    return ctypes.byref(_Time(int(until), int(until % 1 * 1e9)))


def _words(part: Any) -> memoryview:
    """View memory as int64."""
    return memoryview(part).cast("B").cast("q") if len(part) else memoryview(b"")
