"""Clocks of the nodes: ranks' records are merged by time, and a job's time limit is read from its node's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.traced import measure_ahead
from hpcdist.tools.doctor.base import OK, WARNING, Finding, Nodes, Requirements, gather

MAX_OFFSET_S = 0.05  # clocks synchronized by NTP differ by much less


def measure(comm: Communicator, nodes: Nodes, required: Requirements, clock: Callable[[], float] = time.time) -> dict:
    """Collective. Measure the offset of each node's clock to rank 0's, and the offset's uncertainty, in seconds."""
    offsets = measure_ahead(comm, nodes.leaders[1:], clock)
    gather(comm, None)  # other ranks wait here without using their cores
    return {"clocks": {nodes.name(rank): {"ahead_s": s, "error_s": error_s} for rank, (s, error_s) in offsets.items()}}


def judge(measured: dict, nodes: Nodes, required: Requirements) -> Iterator[Finding]:
    """Report each node whose clock is off by more than the uncertainty. If all are, rank 0's clock is the wrong one."""
    clocks, first = measured["clocks"], nodes.names[0]
    deviating = {name: row for name, row in clocks.items() if abs(row["ahead_s"]) - row["error_s"] > MAX_OFFSET_S}
    if len(clocks) > 1 and len(deviating) == len(clocks):
        worst = max((row["ahead_s"] for row in deviating.values()), key=abs)
        text = f"{first}'s clock is {_distance(-worst)} all others. Tell the site: no time service seems to run there"
        yield Finding(WARNING, text, (first,))
        return
    for name, row in deviating.items():
        text = f"{name}'s clock is {_distance(row['ahead_s'])} {first}'s, it must be within {1e3 * MAX_OFFSET_S:g} ms. "
        yield Finding(WARNING, f"{text}Tell the site: no time service seems to run there", (name,))
    if not deviating:
        max_s = max((abs(row["ahead_s"]) + row["error_s"] for row in clocks.values()), default=0.0)
        summary = f", all within {1e3 * max_s:.2g} ms of {first}'s" if clocks else ""
        yield Finding(OK, f"{len(nodes.names)} clock{'s' * (len(nodes.names) > 1)}{summary}")


def _distance(ahead_s: float) -> str:
    size = f"{abs(ahead_s):.1f} s" if abs(ahead_s) >= 1 else f"{1e3 * abs(ahead_s):.0f} ms"
    return f"{size} {'ahead of' if ahead_s > 0 else 'behind'}"
