"""Changing a window in place: as one addition, or not at all."""

from __future__ import annotations

import pytest
import torch

from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import CommunicationError

COUNT = (1 << 18) + 5  # more than a piece


def _meet(theirs, ours):
    half = ours.sub(theirs).mul_(0.5)
    theirs.add_(half)
    ours.sub_(half)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 4)
def test_a_change_is_made_there_and_here_and_counts_both_ways(ranks):
    def body(comm):
        window, own = comm.window(COUNT), torch.full((COUNT,), 4.0)
        lengths, before = [], comm.trace.traffic.copy()

        def meet(theirs, ours):
            lengths.append(len(theirs))
            _meet(theirs, ours)

        comm.barrier()
        if comm.rank == 0:
            assert window.change(meet, comm.size - 1, own)
            assert own.eq(2.0).all() and lengths == [1 << 18, 5]
        comm.barrier()
        spent, found = comm.trace.traffic - before, window.local.unique().tolist()
        comm.barrier()
        window.close()
        return found, spent.bytes_fetched, spent.bytes_sent

    n_bytes = 4 * COUNT * (ranks.size > 1)
    found = ranks(body)
    assert found[-1][0] == [2.0] and all(values == [0.0] for values, *_ in found[:-1])
    assert found[0][1:] == (n_bytes, n_bytes) and all(spent == [0, 0] for _, *spent in found[1:])


@pytest.mark.mpi
@pytest.mark.sizes(2, 4)
def test_nothing_is_lost_where_many_change_and_add_at_once(ranks):
    def body(comm):
        window, ones = comm.window(COUNT, torch.float64), torch.ones(COUNT, dtype=torch.float64)
        comm.barrier()
        for _ in range(10):
            assert window.change(lambda theirs: theirs.add_(1.0), 0)
            window.accumulate(ones, 0)
        comm.barrier()
        found = window.local.unique().tolist()
        comm.barrier()
        window.close()
        return found

    assert ranks(body)[0] == [20.0 * ranks.size]


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_an_error_in_the_function_leaves_the_memory_free_for_others(ranks):
    def body(comm):
        window = comm.window(3)
        comm.barrier()
        with pytest.raises(ZeroDivisionError):
            window.change(lambda theirs: 1 / 0, 0)
        window.accumulate(torch.ones(3), 0)
        comm.barrier()
        found = window.local.tolist()
        window.close()
        return found

    assert ranks(body)[0] == [2.0] * 3


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_a_rank_beyond_the_last_is_refused(ranks):
    def body(comm):
        window = comm.window(3)
        with pytest.raises(CommunicationError, match="rank of a window must be"):
            window.change(torch.Tensor.zero_, 2)
        window.close()

    ranks(body)


@pytest.mark.mpi(min_size=2)
def test_on_another_node_nothing_happens(ranks):
    def body(comm):
        place = comm.apart("tcp")
        window = place.window(3)
        changed = window.change(torch.Tensor.fill_, (comm.rank + 1) % comm.size)
        found = window.local.tolist()
        place.barrier()
        window.close()
        return changed, found

    assert ranks(body) == [(False, [0.0] * 3)] * ranks.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_changes_and_accumulates_of_16_bits_exclude_each_other(ranks, dtype):
    def body(comm):
        window, ones = comm.window(3, dtype), torch.ones(3, dtype=dtype)
        comm.barrier()
        for _ in range(20):
            changed = window.change(lambda theirs: theirs.add_(1), 0)
            window.accumulate(ones, 0)
        comm.barrier()
        found = window.local.tolist()
        window.close()
        return changed, found

    assert ranks(body)[0] == (True, [40.0 * ranks.size] * 3)


def test_simulated_ranks_have_to_do_it_by_messages():
    def body(comm):
        window = comm.window(3)
        return window.change(torch.Tensor.fill_, 0), window.local.tolist()

    assert run_virtual(body, 2) == [(False, [0.0] * 3)] * 2
