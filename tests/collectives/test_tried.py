"""Which of two ways a long call takes: the one that is faster on the slowest rank, and the same on all ranks; works."""

from __future__ import annotations

import time

import pytest
import torch

from hpcdist.collectives.calls import Collectives, operations
from hpcdist.collectives.calls.exchange import MessageExchange
from hpcdist.collectives.calls.prepared import PreparedCall
from hpcdist.collectives.calls.tried import TRIALS, FasterWay, TriedCall
from hpcdist.collectives.calls.work import Work
from hpcdist.errors import DeadlineError

SIZES = pytest.mark.sizes(3)


class Sleeping(PreparedCall):
    def __init__(self, first_s: float, seconds: float):
        self.calls, self._first_s, self._seconds = 0, first_s, seconds

    def __call__(self, *tensors) -> bool:
        time.sleep(self._seconds if self.calls else self._first_s)
        self.calls += 1
        return True


@SIZES
@pytest.mark.mpi(min_size=2)
def test_the_way_that_is_faster_on_the_slowest_rank_is_taken(ranks):
    def body(comm):
        ways = [Sleeping(0.0, 0.05 if comm.rank == 1 else 0.0), Sleeping(0.1, 0.01)]
        call = TriedCall(ways, FasterWay(MessageExchange(comm), 2))
        assert all(call(torch.ones(1)) for _ in range(2 * TRIALS + 5))
        return [way.calls for way in ways]

    assert ranks(body) == [[TRIALS, TRIALS + 5]] * ranks.size


@SIZES
@pytest.mark.mpi(min_size=2)
def test_long_copies_in_a_node_are_tried_both_ways(ranks, monkeypatch):
    monkeypatch.setattr(operations, "TRIED_BYTES", 1 << 12)

    def body(comm):
        found, size, rank = Collectives(comm), comm.size, comm.rank
        for turn in range(2 * TRIALS + 3):
            given = torch.arange(1000.0 * size).view(size, 1000) + rank + turn
            copied, gathered, swapped = given.clone(), torch.empty(size, size, 1000), torch.empty(size, 1000)
            found.broadcast(copied, 1)
            found.all_gather(gathered, given)
            found.all_to_all(swapped, given)
            alike = torch.arange(1000.0 * size).view(size, 1000) + turn
            assert torch.equal(copied, alike + 1)
            assert all(torch.equal(gathered[r], alike + r) for r in range(size))
            assert all(torch.equal(swapped[r], alike[rank] + r) for r in range(size))
        known = [faster.way() for faster in found._faster.values()]
        found.close()
        return len(found._ways), known

    results = ranks(body)
    assert all(ways == 2 and known == results[0][1] and len(known) == 3 for ways, known in results)


# --- works ------------------------------------------------------------------------------------------------------------
def test_a_wait_ends_at_its_limit():
    work = Work(lambda: None)
    with pytest.raises(DeadlineError, match="a collective call was not over after 0.01 s"):
        work.wait(0.01)
    work.run()
    work.wait(0.01)


def test_followers_are_called_when_a_call_is_over_and_at_once_from_then_on():
    called, work = [], Work(lambda: 1 / 0)
    work.when_over(lambda: called.append(("before", work.done())))
    assert not called and work.error is None
    work.run()
    work.when_over(lambda: called.append(("after", work.done())))
    assert called == [("before", True), ("after", True)] and isinstance(work.error, ZeroDivisionError)
