"""The start-up check: who is there, and which pairs reach each other, before anything is collective.

A collective call waits for ever for a member that can't be reached, and some MPI libraries hang, or end the job, while
they start. So all members introduce themselves to the first one, which tells them of each other; then pairs of them
try to reach each other, and tell the first one where that fails. No wait is longer than its limit.

The members are srun's nodes, which use TCP before MPI starts (`tcp.py`), and then all ranks, which use MPI
(`comm/mpi/first_messages.py`). MPI may have a network of its own, so that neither proves anything of the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

Pair = tuple[int, int]
ALL_PAIRS = 128  # of more members not every pair is tried


class Transport(Protocol):
    """Messages between members 0 to size − 1.

    `answer_s`: how long a member may take to come. `reach_s`: how long it may take to reach another one.
    """

    rank: int
    size: int
    answer_s: float
    reach_s: float

    def exchange(self, text: str, limit_s: float, members: Collection[int]) -> dict[int, str]:
        """Collective. Return the texts of those of `members` that reached member 0 within `limit_s`.

        The others wait for its reply twice as long; this member's own text alone, where that does not come.
        """

    def unreachable(self, pairs: Sequence[Pair], texts: Mapping[int, str]) -> list[Pair]:
        """Return those of `pairs` that this member has found to pass nothing. `texts`: all members' introductions."""


class Result(NamedTuple):
    """Members that came, absent ones and unreachable pairs, as member 0 and all that it reaches know them.

    On the others member 0 is absent.
    """

    introductions: dict[int, str]  # of the members that came
    absent: tuple[int, ...] = ()
    unreachable: tuple[Pair, ...] = ()  # pairs of members that pass each other nothing


def check(transport: Transport, introduction: str, pairs: Callable[[Mapping[int, str]], Iterable[Pair]]) -> Result:
    """Collective. Find the members that are absent, and pairs of the others that do not reach each other.

    Args:
        introduction: what the others are to know of this member.
        pairs: tells which pairs to try, from the introductions of those that came.
    """
    came = transport.exchange(introduction, transport.answer_s, range(transport.size))
    if 0 not in came:
        return Result(came, absent=(0,))
    absent = tuple(member for member in range(transport.size) if member not in came)
    wanted = sorted(pairs(came))
    if not wanted:
        return Result(came, absent)
    own = json.dumps(transport.unreachable(wanted, came))
    failed = transport.exchange(own, 2 * transport.reach_s, came)  # those who reach all are there sooner
    return Result(came, absent, tuple(sorted({tuple(pair) for text in failed.values() for pair in json.loads(text)})))


def pairs_to_try(count: int) -> list[Pair]:
    """List the pairs of `count` members: all, or of very many those 1, 2, 4, ... places apart, as in collectives."""
    steps = range(1, count) if count <= ALL_PAIRS else [1 << i for i in range((count - 1).bit_length())]
    return sorted({tuple(sorted((one, (one + step) % count))) for one in range(count) for step in steps})
