"""The communicator of all ranks of the job, the end of MPI, and the removal of MPI's files in shared memory.

The ranks of a node exchange messages through files that the MPI library creates at its start and unlinks at its end; a
job that is killed leaves them behind (16 MB per rank with Open MPI; without a launcher also a job that ends normally).
After all ranks of a node have mapped a file its name is no longer needed: it is removed while the job runs, and the
kernel frees the memory when the last rank ends, however it ends.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from mpi4py import MPI

from hpcdist import log
from hpcdist.comm.capabilities import DEADLINE_S
from hpcdist.comm.mpi import cores, library
from hpcdist.comm.mpi.attached import allow_peers
from hpcdist.comm.mpi.calls import GIVE_WAY_S, barrier, failed_ranks
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.mpi.process import Process
from hpcdist.errors import RankFailedError

SEGMENT = re.compile(r"(?:(?:sm|vader)_segment\.|mpich_shm_)\S+")  # Open MPI's and MPICH's files


def _set_up_node(node: MPI.Intracomm, bound: bool) -> None:
    """Collective. Remove the names of the segments that all ranks of a node have mapped; bind the ranks to cores."""
    share, threads = cores.find_share(node.Get_rank(), node.Get_size()) if bound else (set(), 0)
    segments, shares = zip(*node.allgather((library.loaded_here(SEGMENT), share)))
    for path in set.intersection(*map(set, segments)):
        with suppress(OSError):  # another rank has removed it
            path.unlink()
    if all(shares):  # no rank must keep its affinity mask
        cores.bind(share, threads)


_process: Process | None = None


def world(
    *, deadline_s: float = DEADLINE_S, nodes: tuple[int, ...] | None = None, internode: str = "auto",
    tolerant: bool = False, bind: bool = True,
) -> MpiCommunicator:  # fmt: skip
    """Collective at the first call. Return the communicator of all ranks; later calls return the same one.

    Arguments apply at the first call only. They are those of MpiCommunicator, Process, and `hpcdist.init` (`bind`).
    """
    global _process
    if _process is None:
        _process = Process(tolerant=tolerant)
    if _process.world is None:
        allow_peers()
        all_ranks = MPI.COMM_WORLD.Dup()
        _process.world = MpiCommunicator(
            all_ranks, _process, deadline_s=deadline_s, nodes=nodes, internode=internode, name="world"
        )
        _set_up_node(_process.world.memory.node_mpi(), bind)
        _process.close_at_exit(_process.world.calls)
    return _process.world


def finalise() -> None:
    """Collective. Wait for the other ranks, then finalize MPI: by default this happens at the end of the script."""
    if _process is not None:
        _process.close()
        MPI.Finalize()


@contextmanager
def all_needed(tolerant: bool) -> Iterator[None]:
    """Collective. Context in which the death of a rank ends all ranks; one of them prints the reason.

    If the job is not `tolerant` of deaths, the launcher ends all ranks anyway.
    """
    try:
        if tolerant:
            barrier(MPI.COMM_WORLD)  # before collectives whose errors would not explain the death
        if not tolerant or not failed_ranks(MPI.COMM_WORLD):
            yield
            return
    except (MPI.Exception, RankFailedError):
        if not tolerant or not failed_ranks(MPI.COMM_WORLD):
            raise
    _end_where_all_are_needed(failed_ranks(MPI.COMM_WORLD))  # reached only after a death


def _end_where_all_are_needed(dead: Sequence[int]) -> None:
    """End this rank after a death; the lowest surviving rank reports it."""
    rank = MPI.COMM_WORLD.Get_rank()
    if rank == min(set(range(MPI.COMM_WORLD.Get_size())) - set(dead)):
        who = f"rank {dead[0]} has" if len(dead) == 1 else f"ranks {', '.join(map(str, dead))} have"
        log.before_end(
            f"{who} died before all ranks had arrived in hpcdist.init(), which needs all of them. See its last "
            "output, and start the job again. Ending the job."
        )
    else:
        time.sleep(GIVE_WAY_S)  # otherwise that rank would count this one among the dead
    sys.stdout.flush()
    os._exit(1)
