"""Ranks that wait for ever, found from what each says of itself."""

from __future__ import annotations

from harness.cases import each
from hpcdist.comm.mpi.stuck import RankState, Wait, stuck

BEGUN = {"world": 7, "world/0": 30}


def blocked(comm, number, *, what="allreduce", rank=None, sending=0, **counts):
    """A rank that is blocked in a call."""
    wait = Wait(comm, what, number, rank, "for every rank", 0.4)
    return RankState(f"in {what}", counts=BEGUN | {comm: number} | counts, sending=sending, waits=[wait])


def ended(**counts):
    return RankState("in exit", ended=True, counts=BEGUN | counts)


ENDS = RankState("in exit", ended=True, counts={"world": 7})  # it has closed the other communicator
AHEAD = {"world/0": 31}
CASES = {
    "a rank has ended before the call": ({0: blocked("world/0", 31), 1: ended()}, {0: [1]}),
    "a rank has made the call and ended; another one is slow": ({0: blocked("world/0", 31), 1: ended(**AHEAD)}, {}),
    "a rank has closed the communicator and ended": ({0: blocked("world/0", 31), 1: ENDS}, {}),
    "a slow rank says nothing": ({0: blocked("world/0", 31), 2: blocked("world/0", 31)}, {}),
    "two ranks are in calls of two communicators": (
        {0: blocked("world/0", 31), 1: blocked("world", 8, what="gather")},
        {0: [1], 1: [0]},
    ),
    "one of them has made the other's call before": (
        {0: blocked("world/0", 31), 1: blocked("world", 8, what="gather", **AHEAD)},
        {},
    ),
    "two ranks are in different calls of one communicator": (
        {0: blocked("world", 8), 1: blocked("world", 8, what="gather")},
        {0: [1], 1: [0]},
    ),
    "a rank waits for one that waits for a rank that has ended": (
        {0: blocked("world", 8), 1: blocked("world/0", 31, **{"world": 7}), 2: ended(**{"world": 8})},
        {0: [1], 1: [0, 2]},
    ),
    "a message is awaited of a rank that has ended": (
        {0: blocked("world", 7, what="irecv", rank=1), 1: ended()},
        {0: [1]},
    ),
    "a message may be under way": ({0: blocked("world", 7, what="irecv", rank=1), 1: ended()._replace(sending=1)}, {}),
    "all wait for messages, which may be under way": (
        {r: blocked("world", 7, what="sendrecv", rank=1 - r, sending=1) for r in range(2)},
        {},
    ),
}


@each("name", CASES)
def test_only_ranks_that_wait_for_ever_are_found(name):
    states, found = CASES[name]
    assert stuck(states) == found
    assert stuck({rank: RankState.decode(state.encode()) for rank, state in states.items()}) == found
