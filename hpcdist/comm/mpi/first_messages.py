"""MPI's first messages, with time limits, to detect absent or unreachable ranks (`doctor/startup.py`).

A collective call waits forever for an unreachable rank, and the watchdog itself starts with collective calls. So
nothing here is collective for MPI or blocks in it. Nothing here needs torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence

from mpi4py import MPI

ANSWER_S = 10.0  # limit for a rank's reply; ranks do not all start at the same moment
REACH_S = 2.5  # limit between two ranks; Linux gives up 3 s after the first packet, and Open MPI then ends the job
PAUSE_S = 1e-3
TO_FIRST, FROM_FIRST, HELLO = 1, 2, 3  # tags
_kept: list = []  # buffers of messages that may never be sent


class FirstMessages:
    """Messages between all ranks of the job, for the start-up check."""

    def __init__(self) -> None:
        self.rank, self.size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        self.answer_s, self.reach_s = ANSWER_S, REACH_S

    def exchange(self, text: str, limit_s: float, members: Collection[int]) -> dict[int, str]:
        """Collective. Exchange texts among `members` through rank 0; return those that arrive in time, by rank.

        Rank 0 waits for `limit_s`. A rank to which rank 0 does not reply returns only its text.
        """
        world, until, status = MPI.COMM_WORLD, time.monotonic() + limit_s, MPI.Status()
        texts = {self.rank: text}
        if self.rank > 0:
            _send(text, 0, TO_FIRST)
            while not world.Iprobe(0, FROM_FIRST, status):
                if time.monotonic() > until + limit_s:  # rank 0 may start later, and then waits, too
                    return texts
                time.sleep(PAUSE_S)
            return {int(rank): received for rank, received in json.loads(_receive(status)).items()}
        while len(texts) < len(members) and time.monotonic() < until:
            if not world.Iprobe(MPI.ANY_SOURCE, TO_FIRST, status):
                time.sleep(PAUSE_S)
                continue
            received = _receive(status)
            if status.Get_source() in members:
                texts[status.Get_source()] = received
        MPI.Request.Waitall([_send(json.dumps(texts), rank, FROM_FIRST) for rank in texts if rank > 0])
        return texts

    def unreachable(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Exchange messages between the ranks of each pair, all concurrently.

        Returns the pairs with this rank whose message did not arrive in time.
        """
        until, waiting = time.monotonic() + self.reach_s, {}
        for pair in pairs:
            if self.rank in pair:
                peer, into = sum(pair) - self.rank, bytearray(1)
                waiting[pair] = MPI.COMM_WORLD.Irecv(into, peer, HELLO)
                _kept.append((into, waiting[pair], _send("!", peer, HELLO)))
        while waiting and time.monotonic() < until:
            waiting = {pair: request for pair, request in waiting.items() if not request.Test()}
            time.sleep(PAUSE_S if waiting else 0)
        return list(waiting)


def _send(text: str, rank: int, tag: int) -> MPI.Request:
    data = text.encode()
    request = MPI.COMM_WORLD.Isend(data, rank, tag)
    _kept.append((data, request))
    return request


def _receive(status: MPI.Status) -> str:
    """Receive the probed message as text."""
    data = bytearray(status.Get_count(MPI.BYTE))
    MPI.COMM_WORLD.Recv(data, status.Get_source(), status.Get_tag())
    return data.decode()
