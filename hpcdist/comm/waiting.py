"""Waiting that leaves the core to others, with a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hpcdist.errors import DeadlineError

SPIN_S = 200e-6  # most answers inside a node come within this time, and the shortest sleep takes 70 to 90 µs
SHORTEST_S, LONGEST_S = 20e-6, 1e-3


def wait_until(
    ready: Callable[[], bool],
    deadline_s: float,
    describe: Callable[[], str],
    longest_s: float = LONGEST_S,
    sleep: Callable[[float], bool] | None = None,
) -> float:
    """Wait until `ready()` is true; return the seconds waited. Past the deadline raise DeadlineError with `describe()`.

    Yields its core over and over for a moment, then sleeps a little longer each time, up to `longest_s`: with a
    millisecond, a rank that waits for long uses about a fiftieth of a core. Sleeping also answers sooner than spinning
    where ranks outnumber cores: the kernel lets a sleeper in when its time has come, and makes a rank that yields wait
    for everybody's turn.

    Args:
        sleep: sleeps for so many seconds at most, and tells whether somebody has woken this rank, who changes what
            `ready()` looks at. Then it sleeps for `longest_s` at once.
    """
    if ready():
        return 0.0
    start = time.perf_counter()
    pause_s, spins_until_s = SHORTEST_S, SPIN_S
    while True:
        if ready():
            return time.perf_counter() - start
        waited_s = time.perf_counter() - start
        if waited_s > deadline_s:
            raise DeadlineError(f"{describe()} did not happen within {deadline_s:g} s.")
        if waited_s < spins_until_s:
            os.sched_yield()
        elif sleep is not None:
            if sleep(longest_s):
                spins_until_s = time.perf_counter() - start + SPIN_S
        else:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.25, longest_s)
