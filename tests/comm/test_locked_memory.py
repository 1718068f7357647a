"""Atomic operations inside a node: neither MPI nor the owner takes part in them."""

from __future__ import annotations

import time

import pytest
import torch

from hpcdist.errors import DeadlineError

WAIT_S = 60
pytestmark = pytest.mark.sizes(2, 3)


@pytest.mark.mpi(min_size=2)
def test_an_owner_that_computes_and_does_not_call_mpi_holds_nobody_up(ranks):
    def body(comm):
        words, values, times = comm.window(2, torch.int64), comm.window(3), 50
        last = comm.size - 1
        total, until = times * last, time.monotonic() + WAIT_S
        if comm.rank == last:
            while (words.local[0] < total or values.local[2] < total) and time.monotonic() < until:
                sum(range(1000))  # and keeps the interpreter's lock
            found = words.local[0].item(), words.local[1].item(), values.local.tolist()
            assert found == (total, 1, [0, total, total])
        else:
            for _ in range(times):
                values.accumulate(torch.ones(2), last, 1)
                words.fetch_add(1, last)
                words.compare_and_swap(0, 1, last, 1)
        for window in (words, values):
            window.close()

    ranks(body)


@pytest.mark.mpi(min_size=2)
def test_a_lock_that_does_not_come_free_is_told(ranks):
    from hpcdist.comm.mpi.node_memory import LockedMemory

    def body(comm):
        memory = LockedMemory(comm.memory.node_mpi(), 8, torch.int64, deadline_s=0.1)
        if comm.rank == 0:
            memory.locks[1].__enter__()
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(DeadlineError, match=r"lock of a window on rank 1 of this node .* within 0\.1 s\."):
                memory.atomic("fetch_add", 1, 0, 1)
            memory.atomic("fetch_add", 0, 0, 1)  # another's is free
        comm.barrier()
        if comm.rank == 0:
            memory.locks[1].__exit__()
        comm.barrier()
        memory.atomic("fetch_add", 1, 0, 1)
        comm.barrier()
        found = int(memory.parts[1][0])
        comm.barrier()
        memory.close()
        return found

    assert ranks(body) == [ranks.size] * ranks.size


@pytest.mark.mpi(min_size=2)
def test_who_changes_a_rank_s_memory_wakes_it(ranks, monkeypatch):
    from hpcdist.comm.mpi.node_memory import LockedMemory

    slept, sleep = [], LockedMemory.sleep

    def long_sleep(memory, ready, seconds):
        slept.append(sleep(memory, ready, WAIT_S))  # False: nobody has woken it
        return slept[-1]

    monkeypatch.setattr(LockedMemory, "sleep", long_sleep)

    def body(comm):
        changes = [
            lambda window: window.put(torch.tensor([1]), 0),
            lambda window: window.accumulate(torch.tensor([1]), 0),
            lambda window: window.fetch_add(1, 0),
            lambda window: window.compare_and_swap(3, 4, 0),
        ]
        for apart in (False, True):  # by the ranks themselves, and by the owner's thread
            placed = comm.apart("tcp") if apart else comm
            window = placed.window(1, torch.int64)
            for count, change in enumerate(changes, start=1):
                placed.barrier()
                if comm.rank == 0:
                    window.wait(lambda words, count=count: words[0] >= count)
                elif comm.rank == 1:
                    if not apart:
                        _until(lambda window=window: window._shared._wake_ups[0].asleep[0])
                    change(window)
            window.close()
            if apart:
                placed.close()
        return slept

    found = ranks(body)[0]
    assert len(found) >= 4 and all(found)


def _until(happened):
    until = time.monotonic() + WAIT_S
    while not happened() and time.monotonic() < until:
        time.sleep(1e-3)
