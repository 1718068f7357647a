"""Find ranks that wait for ever: for a rank whose script has ended, or for one that waits for them in another call.

The ranks of a communicator count the calls that all of them make (allreduce, gather, barrier...). A rank that is
blocked in call number c needs each rank that has begun fewer. Such a rank may just be slow. But if its script has ended
it begins no call any more; and if it is blocked in a call of another communicator, which in turn needs the first rank,
both wait for ever. So nothing here depends on time: a right program is never found, however slow its ranks are.

A message from one rank to another is awaited for ever where that rank has ended or waits so, and has nothing under way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Wait(NamedTuple):
    """A call that a rank is blocked in.

    Attributes:
        comm: the communicator's name, the same on all of its ranks.
        what: the call's name.
        number: its number among the communicator's calls of all ranks.
        rank: the rank of the job that it waits for; None: all ranks of the communicator.
        text: whom it waits for and where, for messages.
        waited_s: for how long.
    """

    comm: str
    what: str
    number: int
    rank: int | None
    text: str
    waited_s: float


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
    waits: Iterable[Wait] = ()

    def encode(self) -> bytes:
        """Return it as bytes, to be sent."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankState:
        """Return what `encode` has made bytes of."""
        *others, waits = json.loads(data)
        return cls._make([*others, [Wait(*wait) for wait in waits]])


def stuck(states: Mapping[int, RankState]) -> dict[int, list[int]]:
    """Return the ranks that wait for ever, each with the ranks that will never come to its call.

    Args:
        states: of all ranks that are known to be blocked or to have ended; the others may still come.
    """
    needs = {rank: _needed(rank, states) for rank, state in states.items() if not state.ended}
    while True:
        never = {rank for rank, state in states.items() if state.ended or needs.get(rank)}
        left = {rank: [other for other in needed if other in never] for rank, needed in needs.items()}
        if left == needs:
            return {rank: needed for rank, needed in needs.items() if needed}
        needs = left


def _needed(rank: int, states: Mapping[int, RankState]) -> list[int]:
    """Return the ranks without which one of a rank's calls does not end."""
    return sorted(
        {r for wait in states[rank].waits for r, other in states.items() if r != rank and _lacks(wait, r, other)}
    )


def _lacks(wait: Wait, rank: int, other: RankState) -> bool:
    """Tell whether a call needs what another rank has not begun."""
    if wait.rank is not None:
        return wait.rank == rank and not other.sending
    begun = other.counts.get(wait.comm)  # None: it is none of the communicator's ranks, or has closed it
    if begun is None:
        return False
    return begun < wait.number or any(_differs(wait, theirs) for theirs in other.waits)


def _differs(wait: Wait, other: Wait) -> bool:
    """Tell whether two ranks are in different calls where they must be in the same one."""
    same_number = (wait.comm, wait.number, None) == (other.comm, other.number, other.rank)
    return same_number and wait.what != other.what
