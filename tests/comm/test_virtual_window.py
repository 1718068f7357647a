"""Windows of virtual ranks: what each call does, when it shows, and torn transfers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdist.comm.virtual import ComputeModel, Constant, Network, run_virtual
from hpcdist.errors import CommunicationError

SIZES = (1, 2, 3, 4, 7, 16)
NETWORK = Network(2.0**-10, 2.0**20)
SLOW = Network(1.0, 16.0)  # 4 elements of float32 take a second on a link


# --- what each call does ----------------------------------------------------------------------------------------------
@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    changes=st.lists(st.tuples(st.booleans(), *(st.integers(0, most) for most in (4, 4, 6, 6))), max_size=20),
)
def test_any_sequence_of_changes_equals_that_on_local_memory(counts, changes):
    """Ranks take turns; `count` differs between them and may be 0."""
    size = len(counts)
    expected = [torch.zeros(count) for count in counts]

    def body(comm):
        window = comm.window(counts[comm.rank])
        for number, (add, rank, target, offset, length) in enumerate(changes):
            target, offset = target % size, min(offset, counts[target % size])
            values = torch.full((min(length, counts[target] - offset),), number + 1.0)
            if rank % size == comm.rank:
                (window.accumulate if add else window.put)(values, target, offset)
                part = expected[target][offset : offset + len(values)]
                part.add_(values) if add else part.copy_(values)
            comm.barrier()
        return window.local

    for ours, theirs in zip(run_virtual(body, size, network=NETWORK), expected, strict=True):
        assert torch.equal(ours, theirs)


# --- when it shows ----------------------------------------------------------------------------------------------------
def watch(comm, window, times):
    """What this rank sees in the first and last element, at each time."""
    seen = []
    for time_s in times:
        while comm.now() < time_s:
            comm.compute()
        seen.append((window.local[0].item(), window.local[-1].item()))
    return seen


@pytest.mark.parametrize("call", ["put", "accumulate"])
def test_changes_show_when_they_arrive_first_half_first(call):
    def body(comm):
        window = comm.window(4)
        if comm.rank == 1:
            getattr(window, call)(torch.ones(4), 0)
            return comm.now()
        return watch(comm, window, (1, 1.75, 2, 2.25, 3, 4))

    # A latency for making the window; the first byte arrives at 2 s, the last at 3 s, the acknowledgement at 4 s.
    seen, returned_s = run_virtual(body, 2, network=SLOW, compute=Constant(0.25))
    assert seen == [(0, 0), (0, 0), (1, 0), (1, 0), (1, 1), (1, 1)]
    assert returned_s == 4.0


def test_atomics_show_when_they_arrive():
    def body(comm):
        window = comm.window(1, torch.int64)
        if comm.rank == 1:
            return window.fetch_add(3, 0), comm.now(), window.compare_and_swap(3, 8, 0), comm.now()
        return [first for first, _ in watch(comm, window, (1.75, 2, 3.75, 4))]

    assert run_virtual(body, 2, network=SLOW, compute=Constant(0.25)) == [[0, 3, 3, 8], (0, 3.0, 3, 5.0)]


def test_a_get_is_torn_by_a_change_of_its_owner():
    def body(comm):
        window, out = comm.window(4), torch.empty(4)
        if comm.rank == 0:
            comm.compute()  # from 1 to 2.5 s; the get reads from 2 to 3 s
            window.local.fill_(9)
            comm.compute()
        else:
            window.get(out, 0)
            torn = out.tolist(), comm.now()
            window.get(out, 0)
            return torn, out.tolist()

    assert run_virtual(body, 2, network=SLOW, compute=Constant(1.5))[1] == (([9, 9, 0, 0], 4.0), [9, 9, 9, 9])


class Delays(ComputeModel):
    """Every step of a rank takes its own number of seconds."""

    def __init__(self, *seconds):
        self.seconds = seconds

    def draw(self, rank, generator):
        return self.seconds[rank]


@pytest.mark.parametrize(
    "delay_s, read", [(0, [0, 0]), (0.5, [1, 0]), (1.25, [1, 0]), (2, [1, 0]), (2.5, [1, 1]), (9, [1, 1])]
)
def test_a_get_is_torn_by_every_put_that_it_overlaps(delay_s, read):
    """The put changes the halves 2.25 and 3.25 s after the start; the get reads them at delay + 2 and delay + 1 s."""

    def body(comm):
        window, out = comm.window(4), torch.empty(4)
        comm.compute()
        if comm.rank == 1:
            window.get(out, 0)
        elif comm.rank == 2:
            window.put(torch.ones(4), 0)
        return out[[0, -1]].tolist()

    assert run_virtual(body, 3, network=SLOW, compute=Delays(0, delay_s, 1.25))[1] == read


def test_transfers_that_take_no_time_are_never_torn():
    def body(comm):
        window, out = comm.window(6), torch.empty(6)
        for number in range(20):
            window.put(torch.full((6,), float(comm.rank * 100 + number)), 0)
            window.get(out, 0)
            assert (out == out[0]).all()

    run_virtual(body, 5)


# --- windows over memory that is there already ------------------------------------------------------------------------
def test_attached_memory_is_read_and_written_in_place():
    def body(comm):
        tensor = torch.full((3,), float(comm.rank), requires_grad=True)
        assert comm.memory.can_attach
        window, out = comm.memory.attach(tensor), torch.empty(3)
        assert window.local is tensor
        window.get(out, (comm.rank + 1) % comm.size)
        comm.barrier()
        window.put(out * 10, (comm.rank + 1) % comm.size)
        comm.barrier()
        window.close()
        return tensor.tolist(), tensor.is_leaf

    assert run_virtual(body, 3, network=NETWORK) == [([0] * 3, True), ([10] * 3, True), ([20] * 3, True)]


# --- refused ----------------------------------------------------------------------------------------------------------
def test_what_has_no_sum_is_not_accumulated():
    with pytest.raises(CommunicationError, match="dtype of a sum must be a number; got torch.bool"):
        run_virtual(lambda comm: comm.window(1, torch.bool).accumulate(torch.ones(1).bool(), 0), 1)
