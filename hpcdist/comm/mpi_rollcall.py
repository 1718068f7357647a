"""Who is there: each rank tells rank 0 its host's name, before anything is collective.

A collective call waits for ever for a rank that can't be reached, and the watchdog needs some to begin with. So ranks
exchange one message each with rank 0 first, for which they wait only so long. Nothing here needs torch.
"""

from __future__ import annotations

import platform
import sys
import time
from typing import NamedTuple

from mpi4py import MPI

HERE, ALL_HERE = 1, 2  # tags
NAME_BYTES = 256
PAUSE_S = 1e-3
SETTLE_S = 0.5
_kept: list = []  # buffers of messages that never leave


class Roll(NamedTuple):
    """Who has answered: `hosts[rank]`, and the ranks that are missing. On other ranks than 0: oneself, and rank 0."""

    hosts: dict[int, str]
    missing: tuple[int, ...]


def library() -> str:
    """The MPI library's name and version, one line."""
    return " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0").split())


def size() -> int:
    """The number of ranks in MPI's world."""
    return MPI.COMM_WORLD.Get_size()


def call(limit_s: float) -> Roll:
    """Collective, but waits for nobody longer than `limit_s`; other ranks wait for rank 0's answer twice as long."""
    world, until = MPI.COMM_WORLD, time.monotonic() + limit_s
    rank, name = world.Get_rank(), platform.node()
    if rank == 0:
        hosts, names = {0: name}, {r: bytearray(NAME_BYTES) for r in range(1, size())}
        calls = {r: world.Irecv(names[r], r, HERE) for r in names}
        _kept.extend([names, calls])
        while calls and time.monotonic() < until:
            for r in [r for r, request in calls.items() if request.Test()]:
                del calls[r]
                hosts[r] = names[r].rstrip(b"\0").decode()
            time.sleep(PAUSE_S if calls else 0)
        if not calls:
            answers = [world.Isend(b"", r, ALL_HERE) for r in names]
            MPI.Request.Waitall(answers)
        return Roll(hosts, tuple(calls))
    own = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    requests = [world.Isend(own, 0, HERE), world.Irecv(bytearray(0), 0, ALL_HERE)]
    _kept.extend([own, requests])
    while not MPI.Request.Testall(requests):
        if time.monotonic() > until + limit_s:
            return Roll({rank: name}, (0,))
        time.sleep(PAUSE_S)
    return Roll({rank: name}, ())


def end(status: int) -> None:
    """Ends every rank of the job, once the launcher has had time to pass on what this rank has written."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(SETTLE_S)  # MPICH's launcher drops what it has not read yet
    MPI.COMM_WORLD.Abort(status)
