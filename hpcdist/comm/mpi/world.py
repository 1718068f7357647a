"""The communicator of all ranks of the job, and the end of MPI."""

from __future__ import annotations

from mpi4py import MPI

from hpcdist.comm.mpi import cross_memory, segments
from hpcdist.comm.mpi.communicator import DEADLINE_S, MpiCommunicator
from hpcdist.comm.mpi.process import Process

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
        cross_memory.allow_peers()
        all_ranks = MPI.COMM_WORLD.Dup()
        _process.world = MpiCommunicator(
            all_ranks, _process, deadline_s=deadline_s, nodes=nodes, internode=internode, name="world"
        )
        segments.unlink(_process.world.memory.node_mpi())
        _process.close_at_exit(_process.world.calls)
    return _process.world


def finalise() -> None:
    """Collective. Do now what else happens at the end of the script: wait for the other ranks, then end MPI."""
    if _process is not None:
        _process.close()
        MPI.Finalize()
