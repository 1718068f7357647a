"""The communicator of all ranks of the job, the end of MPI, the removal of MPI's files in shared memory, and cores.

The ranks of a node exchange messages through files that the MPI library creates at its start and unlinks at its end; a
job that is killed leaves them behind (16 MB per rank with Open MPI; without a launcher also a job that ends normally).
After all ranks of a node have mapped a file its name is no longer needed: it is removed while the job runs, and the
kernel frees the memory when the last rank ends, however it ends.

Each rank is bound to separate cores if neither the launcher nor the user has bound it: the kernel often keeps two ranks
that wait for each other on one core while another core idles. Open MPI does not bind with `:oversubscribe`, and MPICH's
mpiexec and srun often don't either.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from mpi4py import MPI

from hpcdist import log
from hpcdist.comm.capabilities import DEADLINE_S
from hpcdist.comm.mpi import library
from hpcdist.comm.mpi.attached import allow_peers
from hpcdist.comm.mpi.calls import GIVE_WAY_S, barrier, failed_ranks
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.mpi.process import Process
from hpcdist.errors import RankFailedError

PROCESSORS = Path("/sys/devices/system/cpu")
SEGMENT = re.compile(r"(?:(?:sm|vader)_segment\.|mpich_shm_)\S+")  # Open MPI's and MPICH's files


def find_share(rank: int, ranks: int) -> tuple[set[int], int]:
    """Return the processors for local rank `rank` of `ranks` on this node, and the number of torch's threads on them.

    The set is empty if the rank must keep its affinity mask: the mask is not the whole machine (the rank is bound, or
    in a container); the rank sees a GPU, and should run close to it; or there are fewer cores than ranks or than
    torch's threads.
    """
    if ranks == 1 or not hasattr(os, "sched_setaffinity") or torch.cuda.device_count() or torch.xpu.is_available():
        return set(), 0
    mask, threads = os.sched_getaffinity(0), torch.get_num_threads()
    cores = whole_cores(mask)
    cores_per_rank = len(cores) // ranks
    share = {processor for core in cores[rank * cores_per_rank : (rank + 1) * cores_per_rank] for processor in core}
    if threads in (len(cores), len(mask)):  # torch's default, counted for the whole machine at import
        threads = cores_per_rank
    is_whole = len(mask) == os.sysconf("SC_NPROCESSORS_ONLN")
    return (share, threads) if is_whole and threads <= len(share) else (set(), 0)


def whole_cores(mask: Collection[int], folder: Path = PROCESSORS) -> list[list[int]]:
    """Return the processors of each core, ordered by socket; each processor is a core if Linux reports no topology."""
    cores: dict[tuple[int, str], list[int]] = {}
    for processor in sorted(mask):
        topology, key = folder / f"cpu{processor}" / "topology", (0, str(processor))
        with suppress(OSError, ValueError):
            key = int((topology / "physical_package_id").read_text()), (topology / "thread_siblings_list").read_text()
        cores.setdefault(key, []).append(processor)
    return [core for _, core in sorted(cores.items(), key=lambda item: item[0][0])]


def bind_to(share: Collection[int], threads: int) -> None:
    """Bind this thread, and the threads it starts from now on, to these processors."""
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setaffinity(0, share)
        torch.set_num_threads(threads)


def _set_up_node(node: MPI.Intracomm, bound: bool) -> None:
    """Collective. Remove the names of the segments that all ranks of a node have mapped; bind the ranks to cores."""
    share, threads = find_share(node.Get_rank(), node.Get_size()) if bound else (set(), 0)
    segments, shares = zip(*node.allgather((library.loaded_here(SEGMENT), share)))
    for path in set.intersection(*map(set, segments)):
        with suppress(OSError):  # another rank has removed it
            path.unlink()
    if all(shares):  # no rank must keep its affinity mask
        bind_to(share, threads)


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
