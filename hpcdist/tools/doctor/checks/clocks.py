"""The nodes' clocks: records of several ranks are put together by time, and a job ends by its own node's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hpcdist.tools.doctor.base import OK, WARNING, Finding, Nodes, Requirements, gather

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator

MOST_S = 0.05  # what clocks that are kept by NTP stay well below


def measure(comm: Communicator, nodes: Nodes, required: Requirements, clock: Callable[[], float] = time.time) -> dict:
    """Collective. Measure how far each node's clock is ahead of rank 0's, and how wrong that may be, in seconds."""
    from hpcdist.comm.traced import measure_ahead

    found = measure_ahead(comm, nodes.leaders[1:], clock)
    gather(comm, None)  # the others wait here, without using their cores
    return {"clocks": {nodes.name(rank): {"ahead_s": s, "error_s": error_s} for rank, (s, error_s) in found.items()}}


def judge(measured: dict, nodes: Nodes, required: Requirements) -> Iterator[Finding]:
    """Report each node whose clock is off by more than the network explains; or all in one line.

    Where most nodes differ from rank 0, its own clock is off.
    """
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
