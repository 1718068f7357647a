"""The clocks of the ranks: how far each is ahead of the first rank's.

Reference: Flaviu Cristian, "Probabilistic clock synchronization", 1989: the reply of a remote clock is taken to be
from the middle of the round trip, and the shortest of several round trips bounds the error best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hpcdist.comm.communicator import Communicator, mpi_of

TRIPS = 8
ASK, TELL = 30_005, 30_006  # tags


class Ahead(NamedTuple):
    """The seconds by which a clock is ahead of the first rank's, and how wrong that may be."""

    seconds: float
    error_s: float


def measure_ahead(comm: Communicator, others: Sequence[int], clock: Callable[[], float]) -> dict[int, Ahead]:
    """Collective. Measure how far these ranks' clocks are ahead of rank 0's, one after the other; known to rank 0.

    The others do not wait here.
    """
    theirs, found = torch.empty(1, dtype=torch.float64), {}
    for other in others:
        trips = []
        for _ in range(TRIPS):
            if comm.rank == 0:
                start = clock()
                comm.isend(torch.zeros(1), other, ASK).wait()
                comm.irecv(theirs, other, TELL).wait()
                end = clock()
                trips.append((end - start, float(theirs) - (start + end) / 2))
            elif comm.rank == other:
                comm.irecv(torch.empty(1), 0, ASK).wait()
                comm.isend(torch.tensor([clock()], dtype=torch.float64), 0, TELL).wait()
        if trips:
            took_s, ahead_s = min(trips)
            found[other] = Ahead(ahead_s, took_s / 2)
    return found


def ahead_of_first(comm: Communicator, clock: Callable[[], float]) -> Ahead:
    """Collective. Return how far this rank's clock is ahead of rank 0's; ranks of one node have one clock.

    Nothing on virtual ranks, which have one clock too.
    """
    if mpi_of(comm) is None:
        return Ahead(0.0, 0.0)
    leaders = {node: comm.memory.nodes.index(node) for node in comm.memory.nodes}
    found = measure_ahead(comm, sorted(set(leaders.values()) - {0}), clock)
    told = comm.gather({str(leader): list(ahead) for leader, ahead in found.items()})[0]
    return Ahead(*told.get(str(leaders[comm.memory.nodes[comm.rank]]), (0.0, 0.0)))
