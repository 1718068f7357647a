"""Which of two ways a long call takes: the one that is faster on the slowest rank, and the same on all ranks."""

from __future__ import annotations

import time

import pytest
import torch

from hpcdist.collectives.calls import Collectives, operations
from hpcdist.collectives.calls.prepared import fastest_of
from hpcdist.collectives.tuning.timing import Trial
from hpcdist.comm.virtual import run_virtual

SIZES = pytest.mark.sizes(3)
TRIALS = operations.TRIALS + 1


class Sleeping:
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
        variants = [Sleeping(0.0, 0.05 if comm.rank == 1 else 0.0), Sleeping(0.1, 0.01)]
        call = fastest_of(variants, Trial(comm, 2, operations.TRIALS))
        assert all(call(torch.ones(1)) for _ in range(2 * TRIALS + 5))
        return [variant.calls for variant in variants]

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
        known = [(trial.variant, trial.decided) for trial in found._trials.values()]
        found.close()
        return len(found._providers), known

    results = ranks(body)
    assert all(variants == 2 and known == results[0][1] and len(known) == 3 for variants, known in results)


def test_another_way_than_the_first_must_be_worth_it():
    def body(comm):
        trial, taken = Trial(comm, 3, rounds=2, warm_up=2, worth=0.9), []
        while not trial.decided:
            taken.append(trial.variant)
            trial.record([1.0, 0.95, 1.5 - 0.7 * comm.rank][trial.variant])  # the slowest rank's third is 1.5
        trial.record(0.0)
        return taken, trial.variant

    assert run_virtual(body, 2) == [([0, 1, 2] * 4, 0)] * 2
