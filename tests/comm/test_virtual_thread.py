"""A further thread of a virtual rank: what it takes in time, its errors, its end."""

from __future__ import annotations

import random

import pytest
import torch

from hpcdist.comm.communicator import beside
from hpcdist.comm.virtual import Constant, Network, run_virtual
from hpcdist.errors import DeadlockError, MismatchError

NETWORK = Network(0.01, 1e9)
SUM_S = 0.04  # a ring of three, four messages


def test_calls_beside_take_no_time_of_the_rank_while_it_computes():
    """And it may wait for all but the last calls."""

    def body(comm):
        channel = comm.split(0)
        thread = beside(channel)
        tensor, times = torch.ones(3), []
        for calls in (1, 3):
            start_s = comm.now()
            for _ in range(calls):
                thread.submit(lambda: channel.allreduce(tensor))
            submitted_s = comm.now()
            comm.compute()
            thread.wait()
            times += [submitted_s - start_s, comm.now() - start_s]
        start_s, ended_s = comm.now(), []
        for _ in range(3):
            thread.submit(lambda: channel.barrier())
        for left in (2, 1, 0):
            thread.wait(left)
            ended_s.append(comm.now() - start_s)
        thread.close()
        channel.close()
        return times, ended_s, tensor.tolist()

    for times, ended_s, found in run_virtual(body, 3, network=NETWORK, compute=Constant(0.05)):
        assert times == pytest.approx([0, 0.05, 0, 3 * SUM_S])
        assert ended_s == pytest.approx([0.02, 0.04, 0.06]), "a barrier of three takes two latencies"
        assert found == [81.0] * 3


def test_messages_beside_share_the_ranks_links():
    def body(comm, second):
        channel = comm.split(0)
        thread = beside(channel)
        peer = comm.rank ^ 1
        start_s = comm.now()
        if second:
            thread.submit(lambda: channel.sendrecv(torch.zeros(250), peer, torch.zeros(250), peer))
        comm.sendrecv(torch.zeros(250), peer, torch.zeros(250), peer)
        thread.wait()
        taken_s = comm.now() - start_s
        thread.close()
        return taken_s

    network = Network(0.0, 1e4)
    assert run_virtual(lambda comm: body(comm, False), 2, network=network) == pytest.approx([0.1] * 2)
    assert run_virtual(lambda comm: body(comm, True), 2, network=network) == pytest.approx([0.2] * 2)


def test_an_error_beside_is_raised_where_the_rank_waits():
    def body(comm):
        thread = beside(comm.split(0))
        thread.submit(lambda: 1 / 0)
        thread.submit(lambda: pytest.fail("a task after one that failed"))
        with pytest.raises(ZeroDivisionError):
            thread.wait()
        thread.submit(lambda: done.append(comm.rank))
        thread.close()

    done = []
    run_virtual(body, 2)
    assert sorted(done) == [0, 1]


def test_a_run_ends_although_nobody_has_closed_the_thread():
    def body(comm):
        channel = comm.split(0)
        beside(channel).submit(lambda: channel.barrier())
        comm.compute()
        return comm.now()

    assert run_virtual(body, 2, compute=Constant(1.0)) == [1.0, 1.0]


def test_a_call_beside_that_not_all_ranks_make_is_a_deadlock_and_named():
    def body(comm):
        channel = comm.split(0)
        thread = beside(channel)
        if comm.rank:
            thread.submit(lambda: channel.barrier())
        thread.wait()
        thread.close()

    with pytest.raises(DeadlockError, match=r"a further thread of rank 1 waits since .* barrier: rank 0 missing"):
        run_virtual(body, 2)


def test_the_thread_draws_from_the_ranks_random_state():
    def body(comm, threaded):
        channel = comm.split(0)
        thread = beside(channel)
        drawn = [random.random()]
        if threaded:
            thread.submit(lambda: drawn.append(random.random()))
            thread.wait()
        else:
            drawn.append(random.random())
        thread.close()
        return [*drawn, torch.rand(1).item()]

    assert run_virtual(lambda comm: body(comm, True), 3) == run_virtual(lambda comm: body(comm, False), 3)


def test_different_calls_beside_are_told():
    def body(comm):
        channel = comm.split(0)
        thread = beside(channel)
        thread.submit((lambda: channel.barrier()) if comm.rank else (lambda: channel.allreduce(torch.ones(1))))
        thread.wait()

    with pytest.raises(MismatchError, match="collective calls must be the same on all ranks"):
        run_virtual(body, 2)
