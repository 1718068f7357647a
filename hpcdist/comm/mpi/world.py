"""The communicator of all ranks of the job, the end of MPI, and the files that MPI leaves in shared memory.

The ranks of a node exchange messages through files that MPI's library makes as it starts and unlinks as it ends; a job
that is killed leaves them behind (16 MB per rank with Open MPI, even of one that ends well where there is no launcher).
Once all ranks of a node have mapped a file nobody needs its name any more, and the kernel frees the memory when the
last of them ends, however that happens: so the names are removed while the job runs.
"""

from __future__ import annotations

import re
from contextlib import suppress

from mpi4py import MPI

from hpcdist.comm.mpi import library
from hpcdist.comm.mpi.attached import allow_peers
from hpcdist.comm.mpi.communicator import DEADLINE_S, MpiCommunicator
from hpcdist.comm.mpi.process import Process

SEGMENT = re.compile(r"(?:(?:sm|vader)_segment\.|mpich_shm_)\S+")  # Open MPI's, MPICH's; without a name no more


def unlink(node: MPI.Intracomm) -> None:
    """Collective. Remove the names of the segments that all ranks of a node have mapped."""
    for path in set.intersection(*map(set, node.allgather(library.loaded_here(SEGMENT)))):
        with suppress(OSError):  # another rank has been faster
            path.unlink()


_process: Process | None = None


def world(
    *,
    deadline_s: float = DEADLINE_S,
    nodes: tuple[int, ...] | None = None,
    internode: str = "auto",
    tolerant: bool = False,
) -> MpiCommunicator:
    """Collective at the first call. Return the communicator of all ranks; later calls return the same one.

    Arguments count at the first call only. They are those of MpiCommunicator and of Process.
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
        unlink(_process.world.memory.node_mpi())
        _process.close_at_exit(_process.world.calls)
    return _process.world


def finalise() -> None:
    """Collective. Do now what else happens at the end of the script: wait for the other ranks, then end MPI."""
    if _process is not None:
        _process.close()
        MPI.Finalize()
