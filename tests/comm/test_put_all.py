"""Many puts at once: all arrive, those to one rank in their order, and together they wait for one round trip."""

from __future__ import annotations

import pytest
import torch

from hpcdist.comm.communicator import Put
from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.errors import CommunicationError

COUNT = 5_000


def _follow(comm, rounds):
    """Rank 0 puts data and then a flag into all memories; the others look at the data when they see the flag."""
    data, flags = comm.window(COUNT), comm.window(1, torch.int64)
    for step in range(1, rounds + 1):
        if comm.rank == 0:
            values = torch.full((COUNT,), float(step))
            ranks = range(comm.size)
            comm.memory.put_all(
                put for rank in ranks for put in (Put(data, values, rank, 0), Put(flags, torch.tensor([step]), rank, 0))
            )
        flags.wait(lambda words, step=step: int(words[0]) == step)
        assert (data.local == step).all()
        comm.barrier()
    for window in (data, flags):
        window.close()
    return True


@pytest.mark.sizes(1, 2, 3, 4)
def test_a_flag_is_seen_after_the_data_before_it(ranks):
    assert all(ranks(lambda comm: _follow(comm, 50), network=Network(1e-5, 1e9)))


@pytest.mark.mpi
@pytest.mark.parametrize("internode", ["tcp", "rma"])
@pytest.mark.sizes(2, 3, 4)
def test_across_nodes_too(ranks, internode):
    def body(comm):
        far = comm.apart(internode)
        followed = _follow(far, 50)
        far.close()
        return followed

    assert all(ranks(body))


@pytest.mark.sizes(1, 3)
def test_it_counts_as_the_puts_do(ranks):
    def body(comm):
        window = comm.window(4)
        before = comm.trace.traffic.copy()
        comm.memory.put_all([])
        comm.memory.put_all([Put(window, torch.ones(2), rank, 1) for rank in range(comm.size)])
        spent = comm.trace.traffic - before
        comm.barrier()
        assert window.local.tolist() == [0.0, 1.0, 1.0, 0.0]
        window.close()
        return spent.bytes_sent, spent.messages_sent

    assert ranks(body) == [(8 * (ranks.size - 1), ranks.size - 1)] * ranks.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("apart", [False, True])
def test_after_one_that_is_refused_windows_still_work(ranks, apart):
    def body(comm):
        channel = comm.apart("tcp") if apart else comm.split(0)
        window = channel.window(4)
        peer = (channel.rank + 1) % channel.size
        with pytest.raises(CommunicationError, match=r"must lie within rank \d's 4 elements; got \[3, 5\)"):
            channel.memory.put_all([Put(window, torch.ones(1), peer, 0), Put(window, torch.ones(2), peer, 3)])
        channel.barrier()
        window.put(torch.full((4,), 7.0), peer)
        channel.barrier()
        found = window.local.tolist()
        window.close()
        channel.close()
        return found

    assert all(found == [7.0] * 4 for found in ranks(body))


def test_all_together_take_one_round_trip():
    latency_s, bandwidth_bytes_s, size = 1e-3, 1e6, 9

    def body(comm):
        window = comm.window(250)
        start = comm.now()
        if comm.rank == 0:
            comm.memory.put_all([Put(window, torch.ones(250), rank, 0) for rank in range(1, size)])
        passed_s = comm.now() - start
        window.close()
        return passed_s

    found = run_virtual(body, size, network=Network(latency_s, bandwidth_bytes_s))
    assert found[0] == pytest.approx(2 * latency_s + (size - 1) * 1000 / bandwidth_bytes_s)
