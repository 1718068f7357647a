"""Plain MPI calls without hpcdist, as references of measurements.

MPI may delay passive-target operations (RMA) until the owner calls MPI (MPI 4.1, 12.7.3).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.mpi.messages import message


def plain_allreduce(comm: Communicator) -> Callable[[Tensor], None]:
    """Return a function that sums a tensor on the host over all ranks, in place, by mpi4py only. It is collective."""
    call, in_place = comm.mpi.Allreduce, MPI.IN_PLACE
    return lambda tensor: call(in_place, tensor.numpy())


def worst_wait(comm: Any, owner: int, origin: int, count: int, compute: Callable[[], None], span_s: float) -> float:
    """Collective. Return the seconds of `origin`'s longest put or get of `count` float32 while `owner` computes.

    The owner runs `compute()`, which takes about `span_s`. Other ranks return 0.0.
    """
    memory = torch.zeros(count if comm.rank == owner else 0)
    win = MPI.Win.Create(MPI.memory.fromaddress(memory.data_ptr(), memory.nbytes), 4, comm=comm.mpi)
    win.Lock_all()
    comm.barrier()
    worst_s = 0.0
    if comm.rank == owner:
        compute()
    elif comm.rank == origin:
        values, start = torch.ones(count), time.perf_counter()
        while time.perf_counter() - start < span_s:
            for call in (win.Put, win.Get):
                call_start = time.perf_counter()
                call(message(values), owner)
                win.Flush(owner)
                worst_s = max(worst_s, time.perf_counter() - call_start)
    win.Unlock_all()
    win.Free()
    return worst_s
