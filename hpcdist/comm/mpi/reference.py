"""What MPI itself does, without hpcdist: the references of measurements.

Passive-target operations (RMA) progress "as if" the owner took no part (MPI 4.1, 12.7.3), but may wait until it calls
MPI.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.mpi.messages import message


def plain_allreduce(comm: Communicator) -> Callable[[Tensor], None]:
    """Sum a tensor on the host over the ranks of `comm`, in place, by mpi4py alone. The call is Collective."""
    call, in_place = comm.mpi.Allreduce, MPI.IN_PLACE
    return lambda tensor: call(in_place, tensor.numpy())


def worst_wait(comm, owner: int, asker: int, count: int, compute: Callable[[], None], span_s: float) -> float:
    """Collective. Time `asker`'s longest put or get of `count` float32 of `owner`'s memory, in seconds; 0.0 on
    other ranks. The owner computes meanwhile: `compute()`, which takes about `span_s`.
    """
    memory = torch.zeros(count if comm.rank == owner else 0)
    win = MPI.Win.Create(MPI.memory.fromaddress(memory.data_ptr(), memory.nbytes), 4, comm=comm.mpi)
    win.Lock_all()
    comm.barrier()
    worst_s = 0.0
    if comm.rank == owner:
        compute()
    elif comm.rank == asker:
        values, start = torch.ones(count), time.perf_counter()
        while time.perf_counter() - start < span_s:
            for call in (win.Put, win.Get):
                began = time.perf_counter()
                call(message(values), owner)
                win.Flush(owner)
                worst_s = max(worst_s, time.perf_counter() - began)
    win.Unlock_all()
    win.Free()
    return worst_s
