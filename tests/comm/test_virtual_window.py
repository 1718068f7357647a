"""Windows of virtual ranks: when changes show and whom they wake, and torn transfers."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import ComputeModel, Constant, Network, run_virtual
from hpcdist.errors import CommunicationError, DeadlineError

NETWORK = Network(2.0**-10, 2.0**20)
SLOW = Network(1.0, 16.0)  # 4 elements of float32 take a second on a link


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
            return comm.compute()
        return [(window.get(out, 0), out.tolist(), comm.now())[1:] for _ in range(2)]

    assert run_virtual(body, 2, network=SLOW, compute=Constant(1.5))[1] == [([9, 9, 0, 0], 4.0), ([9] * 4, 7.0)]


class Delays(ComputeModel):
    """Every step of a rank takes its own number of seconds."""

    def __init__(self, *seconds):
        self.seconds = seconds

    def sample(self, rank, generator):
        return self.seconds[rank]


@each("found", [(0, [0, 0]), (0.5, [1, 0]), (1.25, [1, 0]), (2, [1, 0]), (2.5, [1, 1]), (9, [1, 1])])
def test_a_get_is_torn_by_every_put_that_it_overlaps(found):
    """The put changes the halves 2.25 and 3.25 s after the start; the get reads them at delay + 2 and delay + 1 s."""
    delay_s, read = found

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


def test_what_has_no_sum_is_not_accumulated():
    with pytest.raises(CommunicationError, match="dtype of a sum must be numeric; got torch.bool"):
        run_virtual(lambda comm: comm.window(1, torch.bool).accumulate(torch.ones(1).bool(), 0), 1)


# --- waiting: woken by every kind of change, at its time --------------------------------------------------------------


def change(comm, window, how):
    """Sets element 1 of rank 0's memory from 0 to 1."""
    one = torch.ones(1, dtype=torch.int64)
    if how in ("put", "accumulate"):
        getattr(window, how)(one, 0, 1)
    elif how == "fetch_add":
        window.fetch_add(1, 0, 1)
    elif how == "compare_and_swap":
        window.compare_and_swap(0, 1, 0, 1)
    elif how == "local":
        window.local[1] = 1
        comm.compute()
    elif how == "local, the last thing":
        window.local.numpy()[1] = 1
    else:
        comm.isend(one, 0)
        comm.irecv(window.local[1:]).wait()
        comm.compute()


CHANGES = [  # how, by which rank, and how long it travels
    ("put", 1, NETWORK.latency_s + 8 / NETWORK.bandwidth_bytes_s),
    ("accumulate", 1, NETWORK.latency_s + 8 / NETWORK.bandwidth_bytes_s),
    ("fetch_add", 1, NETWORK.latency_s),
    ("compare_and_swap", 1, NETWORK.latency_s),
    ("local", 0, 0),
    ("local, the last thing", 0, 0),
    ("receive", 0, 0),
]


@each("way", CHANGES)
@each("watcher", [0, 1, 2])
def test_every_kind_of_change_wakes_and_other_ranks_hear_of_it_a_latency_later(way, watcher):
    how, actor, travel_s = way
    if watcher == actor:
        watcher = 3

    def body(comm):
        window = comm.window(2, torch.int64)
        start_s = comm.now()
        if comm.rank == actor:
            comm.compute()
            change(comm, window, how)
        elif comm.rank == watcher:
            window.wait(lambda e: e[1] == 1, rank=0)
            return comm.now() - start_s

    woken_s = run_virtual(body, 4, network=NETWORK, compute=Constant(8.0))[watcher]
    assert woken_s == 8 + travel_s + (NETWORK.latency_s if watcher else 0)


def test_a_moment_is_enough_to_wake():
    def body(comm):
        window = comm.window(1)
        if comm.rank == 0:
            comm.compute()
            window.local.fill_(1)
            window.put(torch.zeros(1), 0)  # its own: at once
        else:
            window.wait(lambda e: e[0] == 1, rank=0)
            value = torch.empty(1)
            window.get(value, 0)
            return value.item()

    assert run_virtual(body, 4, network=NETWORK, compute=Constant(8.0))[1:] == [0, 0, 0]


def test_an_exception_in_a_predicate_is_raised_where_it_waits():
    def body(comm):
        window = comm.window(1)
        if comm.rank == 0:
            with pytest.raises(ZeroDivisionError):
                window.wait(lambda e: e[0] > 0 and 1 / 0)
            return comm.now()
        comm.compute()
        window.put(torch.ones(1), 0)

    assert run_virtual(body, 2, network=NETWORK, compute=Constant(1.0))[0] > 1


def test_a_predicate_that_communicates_is_refused():
    def body(comm):
        window = comm.window(1)
        if comm.rank == 0:
            window.wait(lambda e: e[0] > 0 and comm.now() and comm.compute() == 0)
        else:
            comm.compute()
            window.put(torch.ones(1), 0)

    with pytest.raises(CommunicationError, match="that of rank 0 was used .* while rank 1 ran"):
        run_virtual(body, 2, network=NETWORK, compute=Constant(1.0))


def test_a_wait_past_its_deadline_and_one_that_is_abandoned():
    def body(comm):
        window = comm.window(1, torch.int64)
        if comm.rank == 0:
            for rank in (0, 1):
                start_s = comm.now()
                with pytest.raises(DeadlineError, match="rank 0 waited past the deadline of 0.0005 virtual s for news"):
                    window.wait(lambda e: e[0] > 0, rank=rank, what="news", deadline_s=0.0005)
                assert comm.now() - start_s == pytest.approx(0.0005)
            for _ in range(4):
                comm.compute()
                window.fetch_add(1, 0)
                window.fetch_add(1, 1)
        return comm.now()

    run_virtual(body, 2, network=NETWORK, compute=Constant(1.0))
