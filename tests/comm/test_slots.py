"""Slots of a node: what ranks show each other, how they wait, and who is named if he does not come."""

from __future__ import annotations

import time

import pytest
import torch

from harness.cases import each
from hpcdist.comm.mpi import slots as module
from hpcdist.comm.slots import RowBuffers, Slots
from hpcdist.errors import DeadlineError

pytestmark = pytest.mark.mpi(min_size=2)
SIZES = pytest.mark.sizes(2, 3)


def made(comm):
    found = comm.memory.slots(1 << 15)
    assert found is not None and (found.size, found.n_bytes, found.calls) == (comm.size, 1 << 15, 0)
    return found


@SIZES
@each("ordered", [True, False])
@each("spins", [0, 2000])
@each("count", [5, 2048])  # rows that stay where they are, and rows that move on
def test_ranks_see_what_all_have_shown_in_this_call(ranks, ordered, spins, count, monkeypatch):
    monkeypatch.setattr(module, "ORDERED", ordered)  # as on x86, and elsewhere
    monkeypatch.setattr(module, "SPINS", spins)

    def body(comm):
        slots, seen = made(comm), []
        for call in range(150):
            gathered = slots.row_buffers(torch.int32, count)[slots.calls]
            gathered.rows[comm.rank].fill_(1000 * comm.rank + call)
            assert slots.synchronize(call)
            seen.append(gathered.table[:, 4].tolist())
        slots.close()
        return seen

    expected = [[1000 * rank + call for rank in range(ranks.size)] for call in range(150)]
    assert ranks(body) == [expected] * ranks.size


def test_rows_of_calls_one_after_the_other_never_share_a_place():
    tables = [torch.zeros(2, 1 << 13, dtype=torch.int32) for _ in range(2)]
    memory = [table.view(torch.uint8).numpy() for table in tables]
    lengths = [RowBuffers(tables, memory, count) for count in (1, 3000, 8192, 2048)]
    for call in range(2 * Slots.period):
        for places in lengths:
            rows, table = places[call].table, tables[call % 2]
            assert rows.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
            assert rows.data_ptr() == places[call + Slots.period].table.data_ptr()
            assert rows.data_ptr() == places[call].gathered.rows.ctypes.data
            assert places[call].gathered.rows.shape == (2, rows[0].nbytes)
    assert [len({places[call].table.data_ptr() for call in range(64)}) for places in lengths] == [2, 4, 2, 8]


@SIZES
def test_notes_that_differ_are_seen_by_all(ranks):
    def body(comm):
        slots = made(comm)
        found = [slots.synchronize(fingerprint) for fingerprint in (7, comm.rank == 1, -5, comm.rank, 1 << 62)]
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
            assert slots.synchronize(late)
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
                slots.synchronize(1)
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
