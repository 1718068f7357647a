"""Reading a window in place: what `get` copies, wherever it lies."""

from __future__ import annotations

import pytest
import torch

from hpcdist.errors import CommunicationError


@pytest.mark.sizes(1, 2, 4)
def test_read_is_what_get_copies_and_counts_as_fetched(ranks):
    def body(comm):
        window = comm.window(6)
        window.put(torch.arange(6.0) + 10 * comm.rank, comm.rank)
        comm.barrier()
        before, found = comm.trace.traffic.copy(), []
        for peer in range(comm.size):
            got = torch.empty(3)
            window.get(got, peer, 2)
            assert got.tolist() == [10 * peer + 2.0, 10 * peer + 3.0, 10 * peer + 4.0]
            found.append(torch.equal(window.read(peer, 2, 3), got))
        spent = comm.trace.traffic - before
        comm.barrier()
        window.close()
        return all(found), spent.bytes_fetched, spent.messages_fetched, spent.bytes_sent

    others = ranks.size - 1
    assert ranks(body) == [(True, 2 * 12 * others, 2 * others, 0)] * ranks.size


@pytest.mark.mpi
def test_inside_a_node_nothing_is_copied(ranks):
    def body(comm):
        window = comm.window(4)
        same = window.read(comm.rank, 1, 2).data_ptr() == window.local[1:].data_ptr()
        window.close()
        return same

    assert all(ranks(body))


@pytest.mark.sizes(1, 2)
def test_reading_past_the_end_is_refused(ranks):
    def body(comm):
        window = comm.window(4)
        with pytest.raises(CommunicationError, match=r"must lie within rank 0's 4 elements; got \[2, 5\)"):
            window.read(0, 2, 3)
        window.close()

    ranks(body)
