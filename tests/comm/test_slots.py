"""Slots of a node: what ranks show each other, how they wait, and who is named if he does not come."""

from __future__ import annotations

import time

import pytest
import torch

from harness.cases import each
from hpcdist.comm.mpi import slots as module
from hpcdist.errors import DeadlineError

pytestmark = pytest.mark.mpi(min_size=2)
SIZES = pytest.mark.sizes(2, 4)


def made(comm):
    found = comm.memory.slots(4096)
    assert found is not None and (found.size, found.n_bytes, found.turn) == (comm.size, 4096, 0)
    return found


@SIZES
@each("ordered", [True, False])
@each("spins", [0, 2000])
def test_ranks_see_what_all_have_shown_in_this_turn(ranks, ordered, spins, monkeypatch):
    monkeypatch.setattr(module, "ORDERED", ordered)  # as on x86, and elsewhere
    monkeypatch.setattr(module, "SPINS", spins)

    def body(comm):
        slots, seen = made(comm), []
        for call in range(300):
            views = slots.views(torch.int32, 5)[slots.turn]
            views.rows[comm.rank].fill_(1000 * comm.rank + call)
            assert slots.meet(call)
            seen.append(views.table[:, 4].tolist())
        slots.close()
        return seen

    expected = [[1000 * rank + call for rank in range(ranks.size)] for call in range(300)]
    assert ranks(body) == [expected] * ranks.size


@SIZES
def test_notes_that_differ_are_seen_by_all(ranks):
    def body(comm):
        slots = made(comm)
        found = [slots.meet(note) for note in (7, comm.rank == 1, -5, comm.rank, 1 << 62)]
        slots.close()
        return found

    assert ranks(body) == [[True, False, True, False, True]] * ranks.size


@SIZES
def test_a_rank_that_sleeps_is_woken(ranks):
    def body(comm):
        slots = made(comm)
        for late in range(3):
            if comm.rank == 0:
                time.sleep(0.05 * late)
            assert slots.meet(late)
        slots.close()
        return comm.trace.traffic.waiting_s

    waited = ranks(body)
    assert all(seconds > 0.1 for seconds in waited[1:])


@pytest.mark.sizes(2)
def test_a_rank_that_does_not_come_is_named(ranks):
    def body(comm):
        slots, error = made(comm), ""
        comm.failures.deadline_s = 0.2
        if comm.rank == 0:
            with pytest.raises(DeadlineError) as raised:
                slots.meet(1)
            error = str(raised.value)
        comm.failures.deadline_s = 60.0
        comm.barrier()
        return error

    assert "rank 0: rank 1 to come to the collective call on " in ranks(body)[0]


@SIZES
def test_there_are_none_across_nodes(ranks):
    def body(comm):
        apart = comm.apart()
        found = apart.memory.slots(4096)
        apart.close()
        return found

    assert ranks(body) == [None] * ranks.size
