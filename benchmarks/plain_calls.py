"""The program of `hpcdist bench collectives`: time the calls of one side, in ranks that do nothing else.

    mpiexec -n 2 python plain_calls.py mpi all_reduce,broadcast 4096,65536 15 "0 1"

prints a line of JSON: the seconds of a call, by call and size. With the side `mpi`, MPI's own calls by mpi4py alone, it
imports nothing of hpcdist, so that the environment of another MPI needs mpi4py and NumPy only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI

TIMED_S, MOST_CALLS = 4e-3, 200  # one timing covers as many calls as take about this long together
WARM_UP = 10  # calls; hpcdist tries long ones in two ways first

Make = Callable[[str, int], Callable[[], object]]


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
    for _ in range(WARM_UP):
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


def _side(name: str, comm: MPI.Comm) -> AbstractContextManager[Make]:
    if name == "mpi":
        return nullcontext(partial(mpi_call, comm))
    from benchmarks.collectives import side_calls  # not in the environment of another MPI

    return side_calls(name)


if __name__ == "__main__":
    world, (side, names, sizes, rounds, cores) = MPI.COMM_WORLD, sys.argv[1:]
    if hasattr(os, "sched_setaffinity"):  # launchers bind differently, and not at all from a rank that is bound
        os.sched_setaffinity(0, map(int, cores.split()[world.Get_rank()].split(",")))
    with _side(side, world) as make:
        found = {
            name: {n: _timed(world, make(name, int(n)), int(rounds)) for n in sizes.split(",")}
            for name in names.split(",")
        }
    if world.Get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
