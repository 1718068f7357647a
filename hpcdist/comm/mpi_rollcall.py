"""Who is there, and who reaches whom: before anything is collective, and with limits.

A collective call waits for ever for a rank that can't be reached, and the watchdog needs some to begin with. So ranks
exchange one message each with rank 0 first, and then with each other, for which they wait only so long. None of it
blocks in MPI, and nothing here needs torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI

HERE, ALL_HERE, HELLO = 1, 2, 3  # tags
PAUSE_S = 1e-3
SETTLE_S = 0.5
_kept: list = []  # buffers of messages that never leave


class Roll(NamedTuple):
    """What each rank that has answered said, and who is missing: on other ranks than 0 that one, or nobody."""

    said: dict[int, str]
    missing: tuple[int, ...]


def library() -> str:
    """The MPI library's name and version, one line."""
    return " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0").split())


def size() -> int:
    """The number of ranks in MPI's world."""
    return MPI.COMM_WORLD.Get_size()


def call(own: str, limit_s: float) -> Roll:
    """Collective, but waits for nobody longer than `limit_s`; other ranks wait for rank 0's answer twice as long.

    All ranks learn what each has said, through rank 0: `own`, on this one.
    """
    world, until = MPI.COMM_WORLD, time.monotonic() + limit_s
    rank, said, status = world.Get_rank(), {world.Get_rank(): own}, MPI.Status()
    if rank > 0:
        _send(own, 0, HERE)
        while not world.Iprobe(0, ALL_HERE, status):
            if time.monotonic() > until + limit_s:
                return Roll(said, (0,))
            time.sleep(PAUSE_S)
        return Roll(dict(enumerate(json.loads(_receive(status)))), ())
    while len(said) < size() and time.monotonic() < until:
        if world.Iprobe(MPI.ANY_SOURCE, HERE, status):
            said[status.Get_source()] = _receive(status)
        else:
            time.sleep(PAUSE_S)
    missing = tuple(r for r in range(size()) if r not in said)
    if not missing:
        answer = json.dumps([said[r] for r in range(size())])
        MPI.Request.Waitall([_send(answer, r, ALL_HERE) for r in range(1, size())])
    return Roll(said, missing)


def severed(pairs: Sequence[tuple[int, int]], limit_s: float) -> list[tuple[int, int]]:
    """Collective, once all have answered. Those pairs of ranks that MPI passes nothing between within `limit_s`.

    A message each way, all at the same time. The same on all ranks, if they still reach rank 0.
    """
    world, until = MPI.COMM_WORLD, time.monotonic() + limit_s
    rank, waiting = world.Get_rank(), {}
    for pair in pairs:
        if rank in pair:
            peer, into = sum(pair) - rank, bytearray(1)
            waiting[pair] = world.Irecv(into, peer, HELLO)
            _kept.append((into, waiting[pair], _send("!", peer, HELLO)))
    while waiting and time.monotonic() < until:
        waiting = {pair: request for pair, request in waiting.items() if not request.Test()}
        time.sleep(PAUSE_S if waiting else 0)
    said = call(json.dumps(list(waiting)), 2 * limit_s).said  # those who lack nothing are there sooner
    return sorted({tuple(pair) for told in said.values() for pair in json.loads(told)})


def _send(text: str, rank: int, tag: int) -> MPI.Request:
    data = text.encode()
    request = MPI.COMM_WORLD.Isend(data, rank, tag)
    _kept.append((data, request))
    return request


def _receive(status: MPI.Status) -> str:
    """The message that was probed."""
    data = bytearray(status.Get_count(MPI.BYTE))
    MPI.COMM_WORLD.Recv(data, status.Get_source(), status.Get_tag())
    return data.decode()


def end(status: int) -> None:
    """Ends every rank of the job, once the launcher has had time to pass on what this rank has written."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(SETTLE_S)  # MPICH's launcher drops what it has not read yet
    MPI.COMM_WORLD.Abort(status)
