"""Detect deadlocks: ranks that wait forever for a rank whose script has ended, or that waits for them in another call.

The ranks of a communicator count their collective calls (allreduce, gather, barrier...). A rank blocked in call number
c waits for every rank that has started fewer calls. Such a rank may just be slow. But if its script has ended it starts
no further call; and if it is blocked in a call that in turn needs the first rank, both wait forever. Nothing here
depends on time: a correct program is never reported, however slow its ranks are.

A receive waits forever if its source has ended or waits forever, and has no send in flight. A wait for a change in
memory lasts forever if this holds for all ranks that could change it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Wait(NamedTuple):
    """A call that a rank is blocked in.

    Attributes:
        comm: the communicator's name, the same on all of its ranks.
        what: the call's name.
        number: its number among the communicator's calls of all ranks.
        ranks: ranks of the job, of which one must act; None: all ranks of the communicator must.
        text: description of the awaited rank and the call, for messages.
        since: start time, on the rank's clock.
        waited_s: seconds waited so far.
    """

    comm: str
    what: str
    number: int
    ranks: Collection[int] | None
    text: str
    since: float
    waited_s: float

    @property
    def key(self) -> str:
        """Identifies this wait among all waits of the rank."""
        return f"{self.comm} {self.what} {self.number}" + ("" if self.ranks is None else f" {self.since}")


class RankState(NamedTuple):
    """A rank's report of its state.

    Attributes:
        location: description of where it is, for messages.
        line: the current line of the user's code.
        ended: its script has ended.
        counts: for each of its communicators, the number of collective calls started.
        sending: number of sends in flight.
        waits: the calls that it is blocked in.
    """

    location: str
    line: str = ""
    ended: bool = False
    counts: Mapping[str, int] = {}
    sending: int = 0
    waits: Collection[Wait] = ()

    def since(self, earlier: RankState) -> RankState:
        """Return this state with only the waits that `earlier` has, too."""
        keys = {wait.key for wait in earlier.waits}
        return self._replace(waits=[wait for wait in self.waits if wait.key in keys])

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankState:
        *others, waits = json.loads(data)
        return cls._make([*others, [Wait(*wait) for wait in waits]])


def stuck(states: Mapping[int, RankState], *, tolerant: bool = False) -> dict[int, list[int]]:
    """Return the ranks that wait forever, each with the ranks that will never join its call.

    Args:
        states: states of all ranks known to be blocked or to have ended; other ranks may still join.
        tolerant: the job tolerates deaths. A death may end a circular wait, so only ranks that wait for ended scripts
            are returned.
    """
    ended = {rank for rank, state in states.items() if state.ended}
    never = ended if tolerant else ended | {rank for rank, state in states.items() if state.waits}
    # Drop from `never` the ranks that wait only for ranks that may still join, until no further rank drops out.
    while True:
        missing = {rank: _missing(rank, states, never) for rank in states if rank not in ended}
        waiting = {rank: ranks for rank, ranks in missing.items() if ranks}
        if tolerant or ended | waiting.keys() == never:
            return waiting
        never = ended | waiting.keys()


def nearest_to_cause(waiting: Mapping[int, Collection[int]]) -> int:
    """Return the lowest rank that waits for a rank that does not wait itself; else the lowest rank.

    `waiting` is the result of `stuck`.
    """
    return min(waiting, key=lambda rank: (set(waiting[rank]) <= waiting.keys(), rank))


def transitively_awaited(ranks: Collection[int], states: Mapping[int, RankState]) -> set[int]:
    """Return `ranks` and all ranks that they wait for, directly or indirectly."""
    known = set(ranks)
    while more := {r for rank in known if rank in states for r in _missing(rank, states, states.keys())} - known:
        known |= more
    return known


def _missing(rank: int, states: Mapping[int, RankState], never: Collection[int]) -> list[int]:
    """Return the ranks of `never`, which call nothing further, that `rank` waits for."""
    missing: set[int] = set()
    for wait in states[rank].waits:
        if wait.ranks is None:
            missing.update(r for r in never if r != rank and _waits_for(wait, states[r]))
        elif all(r in never and not states[r].sending for r in wait.ranks):
            missing.update(wait.ranks)
    return sorted(missing)


def _waits_for(wait: Wait, other: RankState) -> bool:
    """Return whether a collective call waits for rank `other`: it has not started it, or is in another call instead."""
    started = other.counts.get(wait.comm)  # None: not a rank of the communicator, or it has closed it
    if started is None:
        return False
    this_call = wait.comm, wait.number, None
    return started < wait.number or any(
        (each.comm, each.number, each.ranks) == this_call and each.what != wait.what for each in other.waits
    )
