"""Choose the rank that reports a failure: where all ranks fail alike, one report is enough."""

from __future__ import annotations

import errno
import os
import socket
import time

FIRST_S, STEP_S, MOST_S = 1.0, 0.25, 3.0  # rank r waits FIRST_S + r STEP_S, MOST_S at most, for a lower one's report
SILENT_S = 10.0  # the time in which the rank that reports ends all others
_claims: list[int] = []  # this process's open socket; the kernel closes it when the process ends


def takes_turn(rank: int) -> bool:
    """Tell whether this rank reports its failure. Wait for its turn; without one, wait to be ended.

    The lowest rank reports at once and ends the job, before the others' turns come. If it does not fail, the first rank
    on each node whose turn comes reports. The ranks of a node find out which by a socket's abstract name, which only
    one process can bind; it holds the number of their common parent process.
    """
    time.sleep(min(FIRST_S + STEP_S * rank, MOST_S) if rank else 0.0)
    if _claims or claim(f"fails-{os.getppid()}"):
        return True
    time.sleep(SILENT_S)
    return False


def claim(name: str) -> bool:
    """Tell whether this process is the first of its user on this node to claim a name, which it keeps until it ends."""
    own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        own.bind(f"\0hpcdist-{os.getuid()}-{name}")
    except OSError as error:
        own.close()
        return error.errno != errno.EADDRINUSE  # no abstract names here: the turns alone decide
    _claims.append(own.detach())
    return True
