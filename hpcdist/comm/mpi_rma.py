"""Windows across nodes by MPI's own one-sided calls.

On a network whose adapters read remote memory themselves they need nobody's help. Elsewhere they progress only while
the owner is inside MPI (MPI 4.1, 12.7.3), so a thread of the owner looks in now and then, which the owner pays for.

The memory is that of a shared window already, and MPI (4.1, 12.2.1) leaves open what concurrent calls on two windows
over the same memory do. Reads and writes of disjoint elements, which is all that goes this way, work on every
library that is tested; accumulates and atomics stay with one window, the shared one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mpi4py import MPI
from torch import Tensor

from hpcdist.comm import mpi
from hpcdist.comm.mpi_buffers import CARRIERS, message

PROGRESS_S = 1e-3  # pause between two calls of MPI; they use 1 to 2 % of a core


class OneSided:
    """Collective. A window's `get` and `put` to and from ranks of other nodes, one-sidedly."""

    def __init__(self, comm, local: Tensor):
        self._comm = comm
        memory = MPI.memory.fromaddress(local.data_ptr(), local.nbytes) if local.nbytes else None
        self._win = MPI.Win.Create(memory, local.itemsize, comm=comm.mpi)
        self._win.Lock_all()
        _Progress.start()

    def get(self, out: Tensor, rank: int, offset: int) -> None:
        self._comm.communicate("window get", rank, self._complete, self._win.Get, out, rank, offset)

    def put(self, values: Tensor, rank: int, offset: int) -> None:
        self._comm.communicate("window put", rank, self._complete, self._win.Put, values, rank, offset)

    def _complete(self, call: Callable, tensor: Tensor, rank: int, offset: int) -> None:
        call(message(tensor), rank, [offset, tensor.numel(), CARRIERS[tensor.itemsize]])
        self._win.Flush(rank)

    def close(self) -> None:
        """Collective."""
        self._win.Unlock_all()
        self._win.Free()
        _Progress.release()


class _Progress:
    """The thread that makes MPI progress while this process computes: one, however many windows need it."""

    users = 0
    running: _Progress | None = None

    def __init__(self):
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcdist-mpi-progress", daemon=True)
        self._thread.start()
        mpi.threads.append(self)

    @classmethod
    def start(cls) -> None:
        cls.users += 1
        if cls.running is None:
            cls.running = cls()

    @classmethod
    def release(cls) -> None:
        cls.users -= 1
        if cls.users == 0:
            cls.running.stop()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._thread.join()
        mpi.threads.remove(self)
        _Progress.running = None

    def _run(self) -> None:
        while not self._stopped.wait(PROGRESS_S):
            # Looks after everything, whatever it asks for; on COMM_SELF, MPICH 5.0.2 would not look at the network.
            MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
