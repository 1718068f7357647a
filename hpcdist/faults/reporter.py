"""Choose the rank that reports a failure: if all ranks fail for the same reason, one report is enough."""

from __future__ import annotations

import errno
import os
import socket
import time

FIRST_S, STEP_S, MAX_S = 1.0, 0.25, 3.0  # rank r waits FIRST_S + r STEP_S, at most MAX_S, for a lower rank's report
SILENT_S = 10.0  # the reporting rank ends all others within this time
_claims: list[int] = []  # this process's open socket; the kernel closes it when the process ends


def is_reporter(rank: int) -> bool:
    """Return whether this rank reports its failure; first wait for its turn. Other ranks then wait to be ended.

    Rank 0 reports immediately and ends the job before the others' turns. If it does not fail, the first rank of each
    node reports: the one that binds an abstract socket name, which contains the id of their common parent process.
    """
    time.sleep(min(FIRST_S + STEP_S * rank, MAX_S) if rank else 0.0)
    if _claims or claim(f"fails-{os.getppid()}"):
        return True
    time.sleep(SILENT_S)
    return False


def claim(name: str) -> bool:
    """Return whether this process is the first of its user on this node to claim a name; it holds it until it ends."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0hpcdist-{os.getuid()}-{name}")
    except OSError as error:
        holder.close()
        return error.errno != errno.EADDRINUSE  # without abstract names only the waiting times decide
    _claims.append(holder.detach())
    return True
