"""Windows while their owner computes: whether MPI's one-sided calls get on alone, and how long ours take at worst.

Gossip that pulls, and parameter servers that train, read and write the memory of ranks that are busy. With some MPI
libraries such calls wait until the owner calls MPI again. `comm/mpi/transports.py` has two ways around that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcdist.tools.doctor.base import OK, WARNING, Finding, Nodes, Requirements, gather

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator
    from hpcdist.comm.mpi.communicator import MpiCommunicator

SPAN_S = 0.4  # how long the owner computes, for each of the two measurements
COUNT = 1 << 14  # elements of float32 in a transfer
WAITED = 0.5  # of that time: a call that takes as long waits for the owner


# --- measuring --------------------------------------------------------------------------------------------------------
def measure(comm: MpiCommunicator, nodes: Nodes, required: Requirements) -> dict:
    """Collective. Measure the longest wait in seconds of MPI's calls alone, and of our windows with their transport.

    Rank 0 owns the memory, the first rank of the second node asks, or rank 1 where there is one node.
    """
    from hpcdist.comm.mpi.reference import worst_wait

    if comm.size == 1:
        return {"origin": None}
    origin = nodes.leaders[1] if len(nodes.names) > 1 else 1
    own = comm.split(0)
    if len(nodes.names) > 1:
        own.memory.choose()  # may measure both ways, and keep what it finds
    alone_s = worst_wait(own, 0, origin, COUNT, _compute, SPAN_S)
    gather(comm, None)
    window_s = _window_wait(own, origin)
    found = gather(comm, [alone_s, window_s])[origin]
    internode = own.memory.internode
    own.close()
    return {
        "origin": origin,
        "internode": internode,
        "mpi_s": found[0],
        "window_s": found[1],
        "library": comm.platform.library,
    }


def _window_wait(comm: Communicator, origin: int) -> float:
    """Collective. Measure the origin's longest transfer; 0.0 on the others."""
    import torch

    window, worst_s = comm.window(COUNT if comm.rank == 0 else 0), 0.0
    values = torch.ones(COUNT)
    if comm.rank == origin:
        window.get(values[:1], 0)  # connects
    gather(comm, None)
    if comm.rank == 0:
        _compute()
    elif comm.rank == origin:
        start = time.perf_counter()
        while time.perf_counter() - start < SPAN_S:
            for call in (window.put, window.get):
                began = time.perf_counter()
                call(values, 0)
                worst_s = max(worst_s, time.perf_counter() - began)
    gather(comm, None)
    window.close()
    return worst_s


def _compute() -> None:
    import torch

    matrix, until = torch.full((192, 192), 1e-3), time.perf_counter() + SPAN_S
    while time.perf_counter() < until:
        matrix @ matrix


# --- judging ----------------------------------------------------------------------------------------------------------
def judge(measured: dict, nodes: Nodes, required: Requirements) -> Iterator[Finding]:
    """Report in one line the windows' transport, and how long both kinds of calls waited."""
    if measured["origin"] is None:
        yield Finding(OK, "one rank: nobody to wait for")
        return
    mpi_s, window_s = measured["mpi_s"], measured["window_s"]
    where = "to another node" if measured["internode"] else "within the node"
    alone = "wait for an owner that computes" if mpi_s > WAITED * SPAN_S else "progress while the owner computes"
    text = f"{measured['library']}: one-sided calls {where} {alone} (worst {1e3 * mpi_s:.3g} ms); windows go by "
    text += f"{measured['internode'] or 'shared memory'}, worst {1e3 * window_s:.3g} ms"
    slow = window_s > WAITED * SPAN_S
    advice = ". Leave a core free on each node, and try --set internode=tcp and rma in turn" * slow
    yield Finding(WARNING if slow else OK, text + advice)
