"""Windows across nodes by MPI's own one-sided calls.

On a network whose adapters read remote memory themselves they need nobody's help. Elsewhere they progress only while
the owner is inside MPI (MPI 4.1, 12.7.3), so a thread of the owner looks in now and then, which the owner pays for.

The memory is that of a shared window already, and MPI (4.1, 12.2.1) leaves open what concurrent calls on two windows
over the same memory do. Reads and writes of disjoint elements, which is all that goes this way, work on every
library that is tested; accumulates and atomics stay with one window, the shared one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.mpi.messages import CARRIERS, message


class OneSided:
    """Collective. Carry one window's `get` and `put` to and from ranks of other nodes, one-sidedly."""

    def __init__(self, comm, local: Tensor):
        self._comm = comm
        memory = MPI.memory.fromaddress(local.data_ptr(), local.nbytes) if local.nbytes else None
        self._win = MPI.Win.Create(memory, local.itemsize, comm=comm.mpi)
        self._win.Lock_all()
        self._progress = ExitStack()
        self._progress.enter_context(comm.process.progress.running())

    def get(self, out: Tensor, rank: int, offset: int) -> None:
        self._comm.calls.communicate("window get", rank, self._complete, self._win.Get, out, rank, offset)

    def put(self, values: Tensor, rank: int, offset: int) -> None:
        self._comm.calls.communicate("window put", rank, self._complete, self._win.Put, values, rank, offset)

    def _complete(self, call: Callable, tensor: Tensor, rank: int, offset: int) -> None:
        call(message(tensor), rank, [offset, tensor.numel(), CARRIERS[tensor.itemsize]])
        self._win.Flush(rank)

    def close(self) -> None:
        """Collective. Release MPI's window."""
        self._win.Unlock_all()
        self._win.Free()
        self._progress.close()
