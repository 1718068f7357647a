"""One-sided communication while the target rank computes: does it progress, and how long do hpcdist's windows
take?

Gossip strategies that pull, and parameter servers that train, access the memory of busy ranks. With some MPI libraries
such calls wait until the target calls MPI. `comm/mpi/transports.py` has two transports that avoid this.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hpcdist.comm.communicator import Communicator, Window
from hpcdist.tools.doctor.base import OK, WARNING, Finding, Nodes, Requirements, gather

if TYPE_CHECKING:  # they start MPI
    from hpcdist.comm.mpi.communicator import MpiCommunicator
    from hpcdist.comm.mpi.window import OneSided

SPAN_S = 0.4  # duration of the target's computation, per measurement
COUNT = 1 << 14  # elements of float32 in a transfer
WAITED = 0.5  # of that time: a call this long waited for the target


# --- measuring --------------------------------------------------------------------------------------------------------
def measure(comm: MpiCommunicator, nodes: Nodes, required: Requirements) -> dict:
    """Collective. Measure the longest wait in seconds of MPI's one-sided calls, and of hpcdist's windows.

    Rank 0 owns the memory; the asker accesses it: the first rank of the second node, or rank 1 on a single node.
    """
    from hpcdist.comm.mpi.window import OneSided

    if comm.size == 1:
        return {"asker": None}
    asker = nodes.leaders[1] if len(nodes.names) > 1 else 1
    subcomm = comm.split(0)  # a copy, whose messages can't mix with others
    if len(nodes.names) > 1:
        subcomm.memory.choose()  # may measure both transports
    memory = torch.zeros(COUNT if comm.rank == 0 else 0)  # which OneSided does not keep
    mpi_s = _longest_wait(subcomm, OneSided(subcomm, memory, helped=False), asker)
    window_s = _longest_wait(subcomm, subcomm.window(len(memory)), asker)
    waits = gather(comm, [mpi_s, window_s])[asker]
    internode = subcomm.memory.internode
    subcomm.close()
    return {
        "asker": asker,
        "internode": internode,
        "mpi_s": waits[0],
        "window_s": waits[1],
        "library": comm.platform.library,
    }


def _longest_wait(comm: Communicator, window: Window | OneSided, asker: int) -> float:
    """Collective. Return the asker's longest put or get, in seconds, on rank 0's window; 0.0 on other ranks."""
    from hpcdist.comm.mpi.transports import compute

    values, worst_s = torch.ones(COUNT), 0.0
    if comm.rank == asker:
        window.get(values[:1], 0, 0)  # connects
    gather(comm, None)
    if comm.rank == 0:
        compute(SPAN_S, keeps_lock=False)
    elif comm.rank == asker:
        start = time.perf_counter()
        while time.perf_counter() - start < SPAN_S:
            for call in (window.put, window.get):
                started = time.perf_counter()
                call(values, 0, 0)
                worst_s = max(worst_s, time.perf_counter() - started)
    gather(comm, None)
    window.close()
    return worst_s


# --- judging ----------------------------------------------------------------------------------------------------------
def judge(measured: dict, nodes: Nodes, required: Requirements) -> Iterator[Finding]:
    """Report the windows' transport, and the longest wait of both kinds of calls."""
    if measured["asker"] is None:
        yield Finding(OK, "one rank: nobody to wait for")
        return
    mpi_s, window_s = measured["mpi_s"], measured["window_s"]
    where = "to another node" if measured["internode"] else "within the node"
    progress = "wait for an owner that computes" if mpi_s > WAITED * SPAN_S else "progress while the owner computes"
    text = f"{measured['library']}: one-sided calls {where} {progress} (worst {1e3 * mpi_s:.3g} ms); windows go by "
    text += f"{measured['internode'] or 'shared memory'}, worst {1e3 * window_s:.3g} ms"
    slow = window_s > WAITED * SPAN_S
    advice = ". Leave a core free on each node, and try --set internode=tcp and rma in turn" * slow
    yield Finding(WARNING if slow else OK, text + advice)
