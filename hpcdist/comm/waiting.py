"""Wait for a condition with a deadline, leaving the core to other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hpcdist.errors import DeadlineError

SPIN_S = 200e-6  # most replies inside a node arrive within this time, and the shortest sleep takes 70 to 90 µs
SHORTEST_S, LONGEST_S = 20e-6, 1e-3


def wait_until(
    ready: Callable[[], bool], deadline_s: float, describe: Callable[[], str], longest_s: float = LONGEST_S,
    sleep: Callable[[float], bool] | None = None,
) -> float:  # fmt: skip
    """Wait until `ready()` is true; return the seconds waited. Past the deadline raise DeadlineError with `describe()`.

    Yields the core repeatedly for a moment, then sleeps a little longer each time, up to `longest_s`: at 1 ms, a rank
    that waits for long uses about 2 % of a core. Sleeping also reacts faster than spinning if there are more ranks than
    cores: the kernel schedules a sleeper when its time is up, and lets a rank that yields wait for all others.

    Args:
        describe: names the awaited event, for the error.
        longest_s: longest pause between two checks.
        sleep: `sleep(seconds)` sleeps until another rank wakes this one, which it does after a change that `ready()`
            checks; returns whether it was woken. It is called with `longest_s` from the first pause on.
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
                spins_until_s = time.perf_counter() - start + SPIN_S  # woken by a change: check often again
        else:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.25, longest_s)
