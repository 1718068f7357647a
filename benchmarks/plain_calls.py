"""MPI's own collective calls, by mpi4py alone: of this process's MPI, or, as a program, of another library's.

    mpiexec -n 2 python plain_calls.py all_reduce,broadcast 4096,65536 15

prints a line of JSON: the seconds of a call, by call and size. It imports nothing of hpcdist, so that the environment
of another MPI needs mpi4py and NumPy only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI

TIMED_S, MOST_CALLS = 4e-3, 200  # one timing covers as many calls as take about this long together


def mpi_call(comm: MPI.Comm, name: str, n_bytes: int) -> Callable[[], object]:
    """Collective. Return a collective call on float32, on buffers of its own.

    Args:
        name: all_reduce, broadcast, all_gather, reduce_scatter or all_to_all.
        n_bytes: of the longer of its buffers.
    """
    size = comm.Get_size()
    whole = np.full(max(1, n_bytes // 4 // size) * size, 1e-9, np.float32)  # not zeros: they would all be one page
    part, other = np.full(len(whole) // size, 1e-9, np.float32), np.ones_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, whole),
        "broadcast": lambda: comm.Bcast(whole),
        "all_gather": lambda: comm.Allgather(part, whole),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, part),
        "all_to_all": lambda: comm.Alltoall(whole, other),
    }
    return calls[name]


def _timed(comm: MPI.Comm, call: Callable[[], object], rounds: int) -> float:
    """Collective. Return the median seconds of a call, of the slowest rank."""
    for _ in range(3):
        comm.Barrier()
        start = perf_counter()
        call()
        once_s = comm.allreduce(perf_counter() - start, MPI.MAX)
    times, taken_s = max(1, min(MOST_CALLS, int(TIMED_S / once_s))), []
    for _ in range(rounds):
        comm.Barrier()
        start = perf_counter()
        for _ in range(times):
            call()
        taken_s.append((perf_counter() - start) / times)
    return comm.allreduce(median(taken_s), MPI.MAX)


if __name__ == "__main__":
    world, (names, sizes, rounds) = MPI.COMM_WORLD, sys.argv[1:]
    found = {
        name: {n: _timed(world, mpi_call(world, name, int(n)), int(rounds)) for n in sizes.split(",")}
        for name in names.split(",")
    }
    if world.Get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
