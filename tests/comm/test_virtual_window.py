"""Windows of virtual ranks: what each call does, when it shows, and torn transfers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdist.comm.virtual import ComputeModel, Constant, Exponential, Jitter, Network, run_virtual
from hpcdist.errors import CommunicationError

SIZES = (1, 2, 3, 4, 7, 16)
NETWORK = Network(2.0**-10, 2.0**20)
SLOW = Network(1.0, 16.0)  # 4 elements of float32 take a second on a link


# --- what each call does ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("network", [None, NETWORK])
@pytest.mark.parametrize("size", [*SIZES, 128])
def test_every_rank_reads_what_every_rank_wrote(size, network):
    def body(comm):
        window = comm.window(size, torch.float64)
        for peer in (comm.rank, (comm.rank + 1) % size, (comm.rank + size // 2) % size):
            window.put(torch.tensor([comm.rank + 1.0], dtype=torch.float64), peer, offset=comm.rank)
        comm.barrier()
        for peer in {(comm.rank - 1) % size, comm.rank}:
            out = torch.empty(size, dtype=torch.float64)
            window.get(out, peer)
            for source in range(size):
                wrote = peer in (source, (source + 1) % size, (source + size // 2) % size)
                assert out[source] == (source + 1 if wrote else 0)
            if peer == comm.rank:
                assert torch.equal(out, window.local)
        window.close()

    run_virtual(body, size, network=network)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint16, torch.int64, torch.complex64], ids=str)
def test_concurrent_accumulates_add_up(dtype):
    def body(comm):
        window = comm.window(5, dtype)
        for _ in range(3):
            comm.compute()
            window.accumulate(torch.full((5,), 2).to(dtype), 0)
        comm.barrier()
        return window.local.to(torch.complex64).tolist()

    results = run_virtual(body, 6, network=SLOW, compute=Exponential(1.0))
    assert results == [[36] * 5] + [[0] * 5] * 5


@pytest.mark.parametrize("network", [None, NETWORK])
@pytest.mark.parametrize("size", [*SIZES, 128])
def test_fetch_add_hands_out_every_number_once(size, network):
    def body(comm):
        window = comm.window(2, torch.int64)
        tickets = []
        for _ in range(3):
            comm.compute()
            tickets.append(window.fetch_add(5, size - 1, offset=1))
        comm.barrier()
        return tickets, window.local.tolist()

    results = run_virtual(body, size, network=network, compute=Jitter(1e-3, 1.0))
    assert sorted(sum((tickets for tickets, _ in results), [])) == list(range(0, 15 * size, 5))
    assert all(tickets == sorted(tickets) for tickets, _ in results)
    assert [local for _, local in results] == [[0, 0]] * (size - 1) + [[0, 15 * size]]


@pytest.mark.parametrize("network", [None, NETWORK])
@pytest.mark.parametrize("size", [2, 5, 16])
def test_compare_and_swap_makes_a_lock(size, network):
    """A counter is read, held for a while, and written: without the lock, updates would be lost."""

    def body(comm, locked):
        lock, counter, value = comm.window(1, torch.int64), comm.window(1), torch.zeros(1)
        for _ in range(3):
            while locked and (found := lock.compare_and_swap(0, 1, 0)) != 0:
                assert found == 1
                lock.wait(lambda e: e[0] == 0, rank=0, what="the lock")
            counter.get(value, 0)
            comm.compute()
            counter.put(value + 1, 0)
            if locked:
                assert lock.compare_and_swap(1, 0, 0) == 1
        comm.barrier()
        counter.get(value, 0)
        return value.item()

    def run(locked):
        return run_virtual(lambda comm: body(comm, locked), size, network=network, compute=Exponential(1e-3))

    assert run(True) == [3.0 * size] * size
    assert max(run(False)) < 3 * size


def test_int64_wraps_and_what_does_not_fit_is_refused():
    def body(comm):
        window = comm.window(1, torch.int64)
        if comm.rank == 1:
            assert window.fetch_add(2**63 - 1, 0) == 0
            assert window.fetch_add(1, 0) == 2**63 - 1
            assert window.fetch_add(0, 0) == -(2**63)
            for call in (lambda: window.fetch_add(2**63, 0), lambda: window.compare_and_swap(0, -(2**63) - 1, 0)):
                with pytest.raises(CommunicationError, match="operand of an atomic must fit in 64 bits; got -?922337"):
                    call()
        comm.barrier()

    run_virtual(body, 2, network=NETWORK)


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


@pytest.mark.parametrize("call", ["accumulate", "fetch_add", "compare_and_swap", "wait"])
def test_attached_memory_takes_get_and_put_only(call):
    def body(comm):
        window = comm.memory.attach(torch.zeros(1, dtype=torch.int64))
        getattr(window, call)(1, rank=0)

    with pytest.raises(CommunicationError, match="an attached window must be used for get and put only"):
        run_virtual(body, 1)


# --- refused ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda w: w.get(torch.zeros(2), 2), r"rank of a window must be a rank in 0\.\.1; got 2"),
        (lambda w: w.put(torch.zeros(3), 0), r"must lie within rank 0's 2 elements; got \[0, 3\)"),
        (lambda w: w.put(torch.zeros(1), 1, 3), r"must lie within rank 1's 3 elements; got \[3, 4\)"),
        (lambda w: w.get(torch.zeros(1), 0, -1), r"must lie within rank 0's 2 elements; got \[-1, 0\)"),
        (lambda w: w.wait(bool, rank=0, offset=1, count=2), r"must lie within rank 0's 2 elements; got \[1, 3\)"),
        (lambda w: w.wait(bool, rank=0, count=-1), r"must lie within rank 0's 2 elements; got \[0, -1\)"),
        (lambda w: w.get(torch.zeros(1).double(), 0), "dtype must be that of the window, torch.float32; got"),
        (lambda w: w.put(torch.zeros(2, 1), 0), "tensor must be flat"),
        (lambda w: w.fetch_add(1, 0), "fetch_add must be used on an int64 window; got a window of torch.float32"),
        (lambda w: w.compare_and_swap(0, 1, 0), "compare_and_swap must be used on an int64 window"),
        (lambda w: (w.close(), w.get(torch.zeros(1), 0)), "a window must not be used once it is closed"),
    ],
)
def test_calls_that_break_a_rule_are_refused(call, message):
    with pytest.raises(CommunicationError, match=message):
        run_virtual(lambda comm: call(comm.window(2 + comm.rank)), 2)


def test_what_has_no_sum_is_not_accumulated():
    with pytest.raises(CommunicationError, match="dtype of a sum must be a number; got torch.bool"):
        run_virtual(lambda comm: comm.window(1, torch.bool).accumulate(torch.ones(1).bool(), 0), 1)


def test_a_negative_count_is_refused():
    with pytest.raises(CommunicationError, match="count of a window must be at least 0; got -1"):
        run_virtual(lambda comm: comm.window(-1), 2)


def test_a_closed_window_has_no_memory():
    def body(comm):
        window = comm.window(3)
        window.close()
        return hasattr(window, "local")

    assert run_virtual(body, 2) == [False, False]
