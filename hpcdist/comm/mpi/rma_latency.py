"""Latency of MPI's one-sided calls (RMA) while the owner computes and does not call MPI.

Passive-target operations progress "as if" the owner took no part (MPI 4.1, 12.7.3), but may wait until it calls MPI.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from mpi4py import MPI

from hpcdist.comm.mpi.buffers import message


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
