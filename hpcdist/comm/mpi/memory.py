"""Memory that the ranks of a node share without MPI: where ranks may die, and for tensors that they sum in place.

Open MPI warns at every start that its own windows are not tested with deaths. Here the kernel keeps a file without a
name for each rank, which the others map through its process; it is gone with the last of them, and no limit of
/dev/shm holds for it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.errors import CommunicationError


class NodeMemory:
    """Collective among the living. A window inside a node with the methods of MPI.Win.

    Any rank may read and write all memory, but only its owner adds to it or changes words of it atomically: there
    threads exclude each other.

    Args:
        comm: the MpiCommunicator; what is mapped is the memory of the ranks of this rank's node.
        n_bytes: of this rank.
    """

    def __init__(self, comm, n_bytes: int):
        self._lock = threading.Lock()
        self._parts = map_parts(comm, n_bytes)

    def Shared_query(self, node_rank: int) -> tuple[mmap.mmap | memoryview, int]:
        return self._parts[node_rank], 1

    def Lock_all(self) -> None:
        pass

    def Sync(self) -> None:
        with self._lock:  # what was written before is seen by whoever reads after
            pass

    def Flush(self, target: int) -> None:
        pass

    def lock(self, target: int) -> None:
        """Keep other threads from changing this rank's memory atomically; they do so for the other ranks."""
        self._lock.acquire()

    def unlock(self, target: int) -> None:
        self._lock.release()

    def Accumulate(self, values: Sequence, target: int, place: Sequence) -> None:
        memory, count, kind = values
        with self._lock:
            elements = self._elements(target, kind.typestr, place[0], count)
            np.add(elements, np.frombuffer(memory, kind.typestr), out=elements)

    def Fetch_and_op(self, value: np.ndarray, before: np.ndarray, target: int, offset: int, op: MPI.Op) -> None:
        """Add to one element, for any `op`, and write its former value into `before`."""
        with self._lock:
            word = self._elements(target, value.dtype, offset, 1)
            before[:] = word
            np.add(word, value, out=word)

    def Compare_and_swap(
        self, value: np.ndarray, expected: np.ndarray, before: np.ndarray, target: int, offset: int
    ) -> None:
        with self._lock:
            word = self._elements(target, value.dtype, offset, 1)
            before[:] = word
            if before[0] == expected[0]:
                word[:] = value

    def _elements(self, target: int, dtype: str | np.dtype, offset: int, count: int) -> np.ndarray:
        dtype = np.dtype(dtype)
        return np.frombuffer(self._parts[target], dtype, count, offset * dtype.itemsize)


def map_parts(comm, n_bytes: int) -> list[mmap.mmap | memoryview]:
    """Collective among the living. Make zeroed memory, and map that of all ranks of this rank's node, in their order.

    Args:
        comm: the MpiCommunicator.
        n_bytes: of this rank.

    Raises:
        CommunicationError: a rank can't make its memory, or map another's.
    """
    own = comm.together(lambda: _made(n_bytes))
    try:
        files = comm.gather([own, n_bytes])
        ranks = [rank for rank in range(comm.size) if comm.memory.nodes[rank] == comm.memory.nodes[comm.rank]]
        return comm.together(lambda: [_mapped(comm, rank, files[rank] or [0, 0], own) for rank in ranks])
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
