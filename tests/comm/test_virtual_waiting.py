"""Waiting for a change in a window of virtual ranks: woken by every kind of change, at its time."""

from __future__ import annotations

import pytest
import torch

from hpcdist.comm.virtual import Constant, Exponential, Network, run_virtual
from hpcdist.errors import CommunicationError, DeadlineError

NETWORK = Network(2.0**-10, 2.0**20)


@pytest.mark.parametrize("network", [None, NETWORK])
@pytest.mark.parametrize("size", [2, 3, 16, 128])
def test_wait_returns_when_the_predicate_holds_and_not_before(size, network):
    def body(comm):
        window = comm.window(2, torch.int64)
        if comm.rank > 0:
            comm.compute()
            start = comm.now()
            window.fetch_add(1, 0, offset=1)
            return start
        woken = []
        for arrived in range(1, size):
            window.wait(lambda e, n=arrived: e[0] >= n, offset=1, count=1)
            woken.append(comm.now())
        assert window.local.tolist() == [0, size - 1]
        return woken

    woken, *started = run_virtual(body, size, network=network, compute=Exponential(1.0))
    latency_s = network.latency_s if network else 0.0
    assert woken == sorted(start + latency_s for start in started)


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


@pytest.mark.parametrize("watcher", [0, 1, 2])
@pytest.mark.parametrize(
    "how, actor, travel_s",
    [
        ("put", 1, NETWORK.latency_s + 8 / NETWORK.bandwidth_bytes_s),
        ("accumulate", 1, NETWORK.latency_s + 8 / NETWORK.bandwidth_bytes_s),
        ("fetch_add", 1, NETWORK.latency_s),
        ("compare_and_swap", 1, NETWORK.latency_s),
        ("local", 0, 0),
        ("local, the last thing", 0, 0),
        ("receive", 0, 0),
    ],
)
def test_every_kind_of_change_wakes_and_other_ranks_hear_of_it_a_latency_later(how, actor, travel_s, watcher):
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


def test_changes_elsewhere_do_not_even_ask_the_predicate():
    asked = []

    def body(comm):
        window = comm.window(6)
        if comm.rank == 0:
            window.wait(lambda e: asked.append(e.tolist()) or e[-1] == 5, offset=2, count=2)
        else:
            for offset in (0, 1, 4, 3):
                window.put(torch.full((1,), 5.0), 0, offset)

    run_virtual(body, 2, network=NETWORK)
    assert asked == [[0, 0], [0, 5]]


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
