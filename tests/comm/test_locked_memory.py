"""Atomic operations inside a node: neither MPI nor the owner takes part in them."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from hpcdist.errors import DeadlineError

WAIT_S = 60


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("keeps_lock", [False, True], ids=["asleep", "computing"])
def test_an_owner_that_does_not_call_mpi_holds_nobody_up(ranks, keeps_lock):
    def body(comm):
        words, values, times = comm.window(2, torch.int64), comm.window(3), 50
        last = comm.size - 1
        total, until = times * last, time.monotonic() + WAIT_S
        if comm.rank == last:
            while (words.local[0] < total or values.local[2] < total) and time.monotonic() < until:
                sum(range(1000)) if keeps_lock else time.sleep(1e-3)
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
    from hpcdist.comm.mpi.locked_memory import LockedMemory

    def body(comm):
        memory = LockedMemory(comm.transports.node_mpi(), 8, deadline_s=0.1)
        word, before = np.ones(1, np.int64), np.empty(1, np.int64)
        if comm.rank == 0:
            memory._lock(1)
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(DeadlineError, match=r"lock of a window on rank 1 of this node .* within 0\.1 s\."):
                memory.Fetch_and_op(word, before, 1, 0, None)
            memory.Fetch_and_op(word, before, 0, 0, None)  # another's is free
        comm.barrier()
        if comm.rank == 0:
            memory._unlock(1)
        comm.barrier()
        memory.Fetch_and_op(word, before, 1, 0, None)
        comm.barrier()
        found = np.frombuffer(memory.Shared_query(1)[0], np.int64)[0]
        del word, before
        comm.barrier()
        memory.Free()
        return found

    assert ranks(body) == [ranks.size] * ranks.size
