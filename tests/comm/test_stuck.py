"""Ranks that wait for ever, found from what each says of itself."""

from __future__ import annotations

from harness.cases import each
from hpcdist.comm.mpi.stuck import RankState, Wait, nearest_to_cause, stuck, transitively_awaited

BEGUN = {"world": 7, "world/0": 30}


def blocked(comm, number, *, what="allreduce", ranks=None, sending=0, **counts):
    """A rank that is blocked in a call."""
    wait = Wait(comm, what, number, ranks, "for every rank", 17.5, 0.4)
    return RankState(f"in {what}", counts=BEGUN | {comm: number} | counts, sending=sending, waits=[wait])


def ended(**counts):
    return RankState("in exit", ended=True, counts=BEGUN | counts)


def requests(*workers):
    return blocked("world", 7, what="Window.wait for a request", ranks=workers)


def reply_of(server):
    return blocked("world", 7, what="Window.wait for the reply", ranks=[server])


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
        {0: blocked("world", 7, what="irecv", ranks=[1]), 1: ended()},
        {0: [1]},
    ),
    "a message may be under way": (
        {0: blocked("world", 7, what="irecv", ranks=[1]), 1: ended()._replace(sending=1)},
        {},
    ),
    "a server waits for workers, one of which has ended, and the other one for its reply": (
        {0: requests(1, 2), 1: reply_of(0), 2: ended()},
        {0: [1, 2], 1: [0]},
    ),
    "a worker of two is slow": ({0: requests(1, 2), 1: reply_of(0)}, {}),
    "a server has ended": ({0: ended(), 1: reply_of(0), 2: blocked("world/1", 3)}, {1: [0]}),
    "a worker is in a call of all workers": (
        {0: requests(1, 2), 1: blocked("world/0", 31), 2: reply_of(0)},
        {0: [1, 2], 1: [0, 2], 2: [0]},
    ),
    "all wait for messages, which may be under way": (
        {r: blocked("world", 7, what="sendrecv", ranks=[1 - r], sending=1) for r in range(2)},
        {},
    ),
}


@each("name", CASES)
def test_only_ranks_that_wait_for_ever_are_found(name):
    states, found = CASES[name]
    assert stuck(states) == found
    assert stuck({rank: RankState.decode(state.encode()) for rank, state in states.items()}) == found


FREED_BY_A_DEATH = {
    "two ranks are in calls of two communicators": {},
    "a rank waits for one that waits for a rank that has ended": {1: [2]},
}


@each("name", FREED_BY_A_DEATH)
def test_where_ranks_outlive_others_only_those_are_that_wait_for_ranks_which_have_ended(name):
    assert stuck(CASES[name][0], tolerant=True) == FREED_BY_A_DEATH[name]


def test_waits_for_memory_count_if_all_have_been_there_at_one_moment():
    before = requests(1, 2)
    later = before._replace(waits=[before.waits[0]._replace(since=18.5)])
    assert before.since(before) == before and not later.since(before).waits
    call = blocked("world/0", 31)
    assert call._replace(waits=[call.waits[0]._replace(since=18.5)]).since(call).waits, "ranks count their calls"


def test_of_ranks_that_wait_for_each_other_in_a_row_the_one_nearest_to_the_cause_is_told():
    assert nearest_to_cause({0: [2], 1: [0, 2], 2: [3]}) == 2
    assert nearest_to_cause({0: [1], 1: [0]}) == 0


def test_ranks_are_named_with_those_that_they_wait_for():
    states = {2: blocked("world", 8), 3: RankState("busy", counts=BEGUN), 4: RankState("", counts={"world": 8})}
    assert transitively_awaited([2], states) == {2, 3}
    assert transitively_awaited([5], states) == {5}
