"""The nodes' clocks: records of several ranks are put together by time, and a job ends by its own node's clock.

Reference: Flaviu Cristian, "Probabilistic clock synchronization", 1989: the reply of a remote clock is taken to be
from the middle of the round trip, and the shortest of several round trips bounds the error best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hpcdist.doctor.base import OK, WARNING, Asked, Finding, Nodes, gather

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator

TRIPS = 8
MOST_S = 0.05  # what clocks that are kept by NTP stay well below
ASK, TELL = 30_005, 30_006  # tags


def measure(comm: Communicator, nodes: Nodes, asked: Asked, clock: Callable[[], float] = time.time) -> dict:
    """Collective. Each node's clock ahead of rank 0's, and how wrong that may be, in seconds."""
    import torch

    told, found = torch.empty(1, dtype=torch.float64), {}
    for leader in nodes.leaders[1:]:
        trips = []
        for _ in range(TRIPS):
            if comm.rank == 0:
                start = clock()
                comm.isend(torch.zeros(1), leader, ASK).wait()
                comm.irecv(told, leader, TELL).wait()
                end = clock()
                trips.append((end - start, float(told) - (start + end) / 2))
            elif comm.rank == leader:
                comm.irecv(torch.empty(1), 0, ASK).wait()
                comm.isend(torch.tensor([clock()], dtype=torch.float64), 0, TELL).wait()
        if trips:
            took_s, ahead_s = min(trips)
            found[nodes.name(leader)] = {"ahead_s": ahead_s, "error_s": took_s / 2}
    gather(comm, None)  # the others wait here, without using their cores
    return {"clocks": found}


def judge(measured: dict, nodes: Nodes, asked: Asked) -> Iterator[Finding]:
    """A line for each node that is off, by more than could be the network's; or one for all. The one that most nodes
    differ from is rank 0's own."""
    clocks, first = measured["clocks"], nodes.names[0]
    off = {name: row for name, row in clocks.items() if abs(row["ahead_s"]) - row["error_s"] > MOST_S}
    if len(clocks) > 1 and len(off) == len(clocks):
        worst = max((row["ahead_s"] for row in off.values()), key=abs)
        text = f"{first}'s clock is {_distance(-worst)} all others. Tell the site: its time service does not run there"
        yield Finding(WARNING, text, (first,))
        return
    for name, row in off.items():
        text = f"{name}'s clock is {_distance(row['ahead_s'])} {first}'s, it must be within {1e3 * MOST_S:g} ms. "
        yield Finding(WARNING, f"{text}Tell the site: its time service does not run there", (name,))
    if not off:
        most_s = max((abs(row["ahead_s"]) + row["error_s"] for row in clocks.values()), default=0.0)
        more = f", all within {1e3 * most_s:.2g} ms of {first}'s" if clocks else ""
        yield Finding(OK, f"{len(nodes.names)} clock{'s' * (len(nodes.names) > 1)}{more}")


def _distance(ahead_s: float) -> str:
    size = f"{abs(ahead_s):.1f} s" if abs(ahead_s) >= 1 else f"{1e3 * abs(ahead_s):.0f} ms"
    return f"{size} {'ahead of' if ahead_s > 0 else 'behind'}"
