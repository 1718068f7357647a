"""Find ranks that wait for ever: for a rank whose script has ended, or for one that waits for them in another call.

The ranks of a communicator count the calls that all of them make (allreduce, gather, barrier...). A rank that is
blocked in call number c needs each rank that has begun fewer. Such a rank may just be slow. But if its script has ended
it begins no call any more; and if it is blocked in a call of another communicator, which in turn needs the first rank,
both wait for ever. So nothing here depends on time: a right program is never found, however slow its ranks are.

A message from one rank to another is awaited for ever where that rank has ended or waits so, and has nothing under way.
A change in memory is awaited for ever where this is so of all ranks that could make it.
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
        ranks: the ranks of the job that it waits for, one of which is enough; None: all ranks of the communicator.
        text: whom it waits for and where, for messages.
        since: when it began, by the rank's own clock.
        waited_s: for how long.
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
        """What tells it from all other waits of its rank."""
        return f"{self.comm} {self.what} {self.number}" + ("" if self.ranks is None else f" {self.since}")


class RankState(NamedTuple):
    """What a rank says of itself.

    Attributes:
        place: where it is, for messages.
        line: its line of the user's code.
        ended: its script has ended.
        counts: for each of its communicators the number of calls of all ranks that it has begun.
        sending: messages that it has begun to send and not completed.
        waits: the calls that it is blocked in.
    """

    place: str
    line: str = ""
    ended: bool = False
    counts: Mapping[str, int] = {}
    sending: int = 0
    waits: Collection[Wait] = ()

    def since(self, earlier: RankState) -> RankState:
        """Return it with those waits alone that it had earlier, too."""
        keys = {wait.key for wait in earlier.waits}
        return self._replace(waits=[wait for wait in self.waits if wait.key in keys])

    def encode(self) -> bytes:
        """Return it as bytes, to be sent."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankState:
        """Return what `encode` has made bytes of."""
        *others, waits = json.loads(data)
        return cls._make([*others, [Wait(*wait) for wait in waits]])


def stuck(states: Mapping[int, RankState], *, tolerant: bool = False) -> dict[int, list[int]]:
    """Return the ranks that wait for ever, each with the ranks that will never come to its call.

    Args:
        states: of all ranks that are known to be blocked or to have ended; the others may still come.
        tolerant: ranks outlive others, so that those which wait for each other may be freed by a death: they are found
            only where they wait for ranks whose scripts have ended.
    """
    ended = {rank for rank, state in states.items() if state.ended}
    never = ended if tolerant else ended | {rank for rank, state in states.items() if state.waits}
    while True:
        missing = {rank: _missing(rank, states, never) for rank in states if rank not in ended}
        found = {rank: ranks for rank, ranks in missing.items() if ranks}
        if tolerant or ended | found.keys() == never:
            return found
        never = ended | found.keys()


def nearest(found: Mapping[int, Collection[int]]) -> int:
    """Return, of ranks that wait for ever, the first that waits for one that waits for nobody; else the first."""
    return min(found, key=lambda rank: (set(found[rank]) <= found.keys(), rank))


def behind(ranks: Collection[int], states: Mapping[int, RankState]) -> set[int]:
    """Return these ranks, those that they wait for, and so on."""
    known = set(ranks)
    while more := {r for rank in known if rank in states for r in _missing(rank, states, states.keys())} - known:
        known |= more
    return known


def _missing(rank: int, states: Mapping[int, RankState], never: Collection[int]) -> list[int]:
    """Return those of the ranks that never come which one of a rank's calls waits for."""
    missing: set[int] = set()
    for wait in states[rank].waits:
        if wait.ranks is None:
            missing.update(r for r in never if r != rank and _lacks(wait, states[r]))
        elif all(r in never and not states[r].sending for r in wait.ranks):
            missing.update(wait.ranks)
    return sorted(missing)


def _lacks(wait: Wait, other: RankState) -> bool:
    """Tell whether a call of all ranks needs what another rank has not begun."""
    started = other.counts.get(wait.comm)  # None: it is none of the communicator's ranks, or has closed it
    if started is None:
        return False
    return started < wait.number or any(_differs(wait, theirs) for theirs in other.waits)


def _differs(wait: Wait, other: Wait) -> bool:
    """Tell whether two ranks are in different calls where they must be in the same one."""
    same_number = (wait.comm, wait.number, None) == (other.comm, other.number, other.ranks)
    return same_number and wait.what != other.what
