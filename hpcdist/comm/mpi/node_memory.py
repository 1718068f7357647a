"""Memory that the ranks of a node share, with atomic operations that need neither MPI nor the owner's help.

`LockedMemory` is MPI's shared memory. MPI does not specify which rank executes an atomic operation on a shared window.
MPICH 4.0 sends it to the owner, which executes it in its next MPI call: after 2 ms if the owner waits, later if it
computes. All ranks of the node map the memory, so here each rank executes its operations itself, holding a lock that is
stored in the owner's memory. A rank that waits for a change of its memory sleeps on a semaphore stored there; the rank
that changes it wakes it.

`MemfdMemory` needs no MPI: it is used if the job tolerates deaths (Open MPI warns at every start that its windows are
not tested with deaths), and for tensors that ranks sum in place. It is a file without a name (memfd) of each rank,
which the others map through /proc. The kernel frees it with the last process, and limits of /dev/shm don't apply.
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
    """The memory of a node's ranks, mapped by all of them, with atomic operations under a lock per rank.

    Ranks are local ranks: numbers within the node.

    Args:
        parts: each rank's memory.
        locks: each rank's lock, held during a change of the rank's memory. It excludes threads of this process, and
            for `LockedMemory` also other ranks.
    """

    def __init__(self, parts: Sequence[Any], locks: Sequence[AbstractContextManager[Any]], dtype: torch.dtype):
        self.locks = locks
        self.parts = [
            torch.frombuffer(part, dtype=dtype) if len(part) else torch.empty(0, dtype=dtype) for part in parts
        ]
        # NumPy adds a few elements in half of torch's time, but not 16-bit floats; Python's integers take a tenth.
        self._arrays = [part.numpy() for part in self.parts] if dtype in NUMBERS else []
        self._integers = [_as_int64(part) for part in parts] if dtype == torch.int64 else []

    def add(self, values: Tensor, target: int, first: int) -> None:
        """Add values on the host to elements [first, first + len(values)) of a rank's memory."""
        stop = first + len(values)
        with self.locks[target]:
            if self._arrays:
                elements = self._arrays[target][first:stop]
                np.add(elements, values.detach().numpy(), out=elements)
            else:
                self.parts[target][first:stop].add_(values.detach())

    def atomic(self, what: str, target: int, offset: int, *values: int) -> int:
        """Apply `fetch_add` (value) or `compare_and_swap` (expected, desired) to an element; return its old value."""
        elements = self._integers[target]
        with self.locks[target]:
            before = elements[offset]
            elements[offset] = atomic(what, before, *values)
        return before

    @abc.abstractmethod
    def sync(self) -> None:
        """Memory fence: make earlier writes visible to later reads of other ranks."""

    def close(self) -> None:
        """Release the memory. Collective for `LockedMemory`."""
        for views in (self.parts, self._arrays, self._integers):
            views.clear()


class MemfdMemory(NodeMemory):
    """Collective among the surviving ranks. Memory without MPI; only threads of the owner change it atomically.

    Args:
        comm: the MpiCommunicator; the memory of the ranks of this node is mapped.
        n_bytes: size of this rank's memory.
    """

    def __init__(self, comm: Any, n_bytes: int, dtype: torch.dtype):
        parts = map_parts(comm, n_bytes)
        self._fence = threading.Lock()
        super().__init__(parts, [threading.Lock() for _ in parts], dtype)

    def sync(self) -> None:
        with self._fence:
            pass


def map_parts(comm: Any, n_bytes: int) -> list[mmap.mmap | memoryview]:
    """Collective among the surviving ranks. Allocate zeros; return the memory of this node's ranks, by local rank.

    Args:
        comm: the MpiCommunicator.
        n_bytes: size of this rank's memory.

    Raises:
        CommunicationError: a rank can't allocate its memory, or map another's.
    """
    local_file = comm.raise_on_all_ranks(lambda: _create_memfd(n_bytes))
    try:
        files = comm.gather([local_file, n_bytes])
        ranks = comm.memory.local_ranks
        return comm.raise_on_all_ranks(lambda: [_map(comm, rank, files[rank] or [0, 0], local_file) for rank in ranks])
    finally:
        os.close(local_file)


def _create_memfd(n_bytes: int) -> int:
    """Create a file without a name, of `n_bytes` zeros; return its descriptor."""
    file = os.memfd_create("hpcdist-window")
    try:
        if n_bytes:
            os.posix_fallocate(file, 0, n_bytes)
    except OSError as error:
        os.close(file)
        raise CommunicationError(
            f"{n_bytes} bytes of shared memory must be available; got {error.strerror}."
        ) from error
    return file


def _map(comm: Any, rank: int, file_of: Sequence[int], local_file: int) -> mmap.mmap | memoryview:
    """Map the memory of a rank of this node; an empty view for a dead rank."""
    file, n_bytes = file_of  # its descriptor in that rank's process
    if not n_bytes:
        return memoryview(b"")
    if rank == comm.rank:
        return mmap.mmap(local_file, n_bytes)
    path = f"/proc/{comm.pids[rank]}/fd/{file}"
    try:
        remote_file = os.open(path, os.O_RDWR)
    except OSError as error:
        raise CommunicationError(
            f"rank {comm.rank} can't map the memory of rank {rank}, which is on the same node ({error}). Start all "
            "ranks of a node in one container, or without --with-ft ulfm."
        ) from error
    try:
        return mmap.mmap(remote_file, n_bytes)
    finally:
        os.close(remote_file)


class SharedTensor:
    """Collective. Zeros in memory that all ranks map; all ranks are on one node.

    Args:
        comm: the MpiCommunicator.
        count: number of elements, the same on all ranks.

    Attributes:
        local: this rank's memory, shape (count,).

    Raises:
        CommunicationError: a rank can't allocate its memory, or map another's; raised on all ranks.
    """

    def __init__(self, comm: Any, count: int, dtype: torch.dtype):
        n_bytes = count * dtype.itemsize
        self._parts = [torch.frombuffer(part, dtype=torch.uint8) for part in map_parts(comm, n_bytes)]
        self._first, self._end = self._parts[comm.rank].data_ptr(), self._parts[comm.rank].data_ptr() + n_bytes
        self.local = self._parts[comm.rank].view(dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies within this rank's memory."""
        return self._first <= tensor.data_ptr() < self._end

    def views_of(self, tensor: Tensor) -> list[Tensor]:
        """Return, for a flat tensor in this rank's memory, the views at the same offset of all ranks' memory."""
        start = tensor.data_ptr() - self._first
        return [part[start : start + tensor.nbytes].view(tensor.dtype) for part in self._parts]


LINE = 64  # bytes of a cache line; a lock or a semaphore is smaller on any platform
_SHARED = 1  # PTHREAD_PROCESS_SHARED, and sem_init's `pshared`
_LONGEST_S = 1e9

# Calls that return immediately keep the GIL (PyDLL): acquiring it again may take 5 ms.
_libc = ctypes.CDLL(None)
_try_lock, _unlock = (getattr(ctypes.PyDLL(None), f"pthread_mutex_{name}") for name in ("trylock", "unlock"))
_post = ctypes.PyDLL(None).sem_post


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _SharedLock:
    """A lock shared by the processes of a node, stored in the memory of one rank, whose process calls `create`."""

    def __init__(self, rank: int, address: int, deadline_s: float):
        self._rank, self._address, self._deadline_s = rank, ctypes.c_void_p(address), deadline_s
        self._thread_lock = threading.Lock()  # threads of one process wait here, without using a core

    def create(self) -> None:
        attributes = ctypes.create_string_buffer(LINE)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _SHARED)
        _libc.pthread_mutex_init(self._address, attributes)

    def __enter__(self) -> None:
        self._thread_lock.acquire()
        # Both calls return 0 if they have acquired the lock.
        if _try_lock(self._address) and _libc.pthread_mutex_timedlock(
            self._address, _after(min(self._deadline_s, _LONGEST_S))
        ):
            self._thread_lock.release()
            raise DeadlineError(
                f"the lock of a window on rank {self._rank} of this node was not released within "
                f"{self._deadline_s:g} s. The rank that holds it is stopped, or has died: see its last output."
            )

    def __exit__(self, *raised: object) -> None:
        _unlock(self._address)
        self._thread_lock.release()


class WakeUp:
    """A semaphore in shared memory, on which one rank sleeps until another rank changes memory and wakes it.

    Args:
        semaphore: address of at least 32 bytes for the semaphore.
        asleep: an int64 in shared memory: whether the rank sleeps.
    """

    def __init__(self, semaphore: int, asleep: memoryview):
        self._semaphore, self.asleep = ctypes.c_void_p(semaphore), asleep

    def create(self) -> None:
        """Initialize the semaphore before it is used. Called by the rank that will sleep."""
        _libc.sem_init(self._semaphore, _SHARED, 0)
        self.asleep[0] = 0

    def sleep(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Sleep until `wake`, at most for `seconds`, and not if `ready()`; return whether it was woken or is ready."""
        self.asleep[0] = 1  # before the last check, so that a rank that changes the memory after it sees this
        try:
            return ready() or not _libc.sem_timedwait(self._semaphore, _after(seconds))
        finally:
            self.asleep[0] = 0

    def wake(self) -> None:
        """Wake the rank if it sleeps, after a change of the memory that it checks."""
        if self.asleep[0]:
            self.asleep[0] = 0
            _post(self._semaphore)


class LockedMemory(NodeMemory):
    """Collective. MPI's shared memory: any rank of the node changes any part of it, under shared locks.

    Args:
        node: MPI's communicator of the ranks of this node.
        n_bytes: size of this rank's memory.
        deadline_s: limit for acquiring a lock, which is held only during an addition.
    """

    def __init__(self, node: MPI.Intracomm, n_bytes: int, dtype: torch.dtype, deadline_s: float):
        self._win = MPI.Win.Allocate_shared(n_bytes + 4 * LINE, 1, comm=node)
        self._win.Lock_all()
        parts, locks, self._wake_ups = [], [], []
        # Each rank's part holds a lock, a semaphore and `asleep`, in a cache line each; then the elements.
        for rank, length in enumerate(node.allgather(n_bytes)):
            memory, _ = self._win.Shared_query(rank)
            first = -memory.address % LINE  # the same in all processes, as mappings start at a page
            locks.append(_SharedLock(rank, memory.address + first, deadline_s))
            asleep = _as_int64(memory[first + 2 * LINE : first + 3 * LINE])
            self._wake_ups.append(WakeUp(memory.address + first + LINE, asleep))
            parts.append(memory[first + 3 * LINE : first + 3 * LINE + length])
        super().__init__(parts, locks, dtype)
        self._rank = node.Get_rank()
        locks[self._rank].create()
        self._wake_ups[self._rank].create()
        node.Barrier()

    def sync(self) -> None:
        self._win.Sync()

    def close(self) -> None:
        super().close()
        self._wake_ups.clear()
        self._win.Unlock_all()
        self._win.Free()

    def sleep(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Sleep until `wake` is called for this rank, at most for `seconds`; see `WakeUp.sleep`."""
        return self._wake_ups[self._rank].sleep(ready, seconds)

    def wake(self, target: int) -> None:
        """Wake a rank that sleeps, after a change of its memory."""
        self._wake_ups[target].wake()


def _after(seconds: float) -> Any:
    """Return the time `seconds` from now as libc's timespec."""
    until = time.time() + seconds
    return ctypes.byref(_Time(int(until), int(until % 1 * 1e9)))


def _as_int64(part: Any) -> memoryview:
    return memoryview(part).cast("B").cast("q") if len(part) else memoryview(b"")
