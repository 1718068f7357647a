"""Each virtual rank is like a process of its own: random numbers, grad mode, the backward pass, further threads."""

from __future__ import annotations

import gc
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from harness.cases import each
from hpcdist.comm.virtual import Constant, Jitter, Network, run_virtual
from hpcdist.errors import DeadlockError, MismatchError


@pytest.fixture(autouse=True)
def nothing_leaks():
    """No thread, and nothing of the process's state, outlives a run."""
    np.random.randn(1)  # numpy keeps a second number for later
    n_threads, collects_at = torch.get_num_threads(), gc.get_threshold()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("virtual rank")]
    assert torch.get_num_threads() == n_threads and gc.get_threshold() == collects_at
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    np.testing.assert_equal(np.random.get_state(legacy=False), states[2])


def draw() -> list:
    odd = np.random.randn(1).tolist()  # an odd number, so that numpy keeps one for later
    return [torch.rand(3).tolist(), torch.randn(17).tolist(), random.random(), random.gauss(0, 1), odd]


@each("size", [2, 16])
def test_random_numbers_do_not_depend_on_the_other_ranks(size):
    raise_on_all_ranks = run_virtual(lambda comm: [(draw(), comm.compute())[0] for _ in range(7)], size, seed=5)
    in_one_go = run_virtual(lambda comm: [draw() for _ in range(7)], size, seed=5)
    assert raise_on_all_ranks == in_one_go
    assert all(a != b for a, b in itertools.pairwise(raise_on_all_ranks))


def test_a_generator_that_the_body_puts_into_numpy_is_its_own():
    def body(comm):
        if comm.rank == 0:
            np.random.set_bit_generator(np.random.PCG64(3))
        drawn = []
        for _ in range(3):
            comm.compute()
            drawn.append(np.random.randn(1).item())
        return drawn

    expected = np.random.RandomState(np.random.PCG64(3)).randn(3).tolist()
    first, second = run_virtual(body, 2)
    assert first == expected and second != expected


def test_torch_computes_with_one_thread_and_grad_mode_is_a_ranks_own():
    def body(comm):
        with torch.set_grad_enabled(comm.rank % 2 == 0):
            for _ in range(3):
                comm.barrier()
                assert torch.is_grad_enabled() == (comm.rank % 2 == 0)
        return torch.is_grad_enabled(), torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.no_grad():
        assert run_virtual(body, 4) == [(True, 1)] * 4
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@each("size", [1, 5])
def test_ranks_switch_inside_the_backward_pass(size):
    """Gradients reduced in hooks equal those of one process with all the data."""
    inputs = torch.randn(size, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def net():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def body(comm):
        model, order = net(), []
        for name, parameter in model.named_parameters():

            def reduce(parameter, name=name):
                order.append((name, threading.current_thread().name))
                comm.compute()
                comm.allreduce(parameter.grad.view(-1))

            parameter.register_post_accumulate_grad_hook(reduce)
        for _ in range(2):
            model.zero_grad()
            model(inputs[comm.rank]).square().sum().backward()
        assert {thread for _, thread in order} == {f"virtual rank {comm.rank}"} and len(order) == 8
        return [p.grad for p in model.parameters()]

    serial = net()
    serial(inputs.flatten(0, 1)).square().sum().backward()
    for grads in run_virtual(body, size, network=Network(1e-6, 1e9), compute=Jitter(1.0, 0.3)):
        for ours, theirs in zip(grads, serial.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad, rtol=1e-12, atol=1e-12)


def test_inference_tensors_can_be_sent_and_received_among_ranks_in_other_modes():
    def body(comm):
        with torch.inference_mode(comm.rank % 2 == 0):
            window = comm.window(3)
            mine, other = torch.full((3,), float(comm.rank)), torch.zeros(3)
            peer = (comm.rank + 1) % comm.size
            comm.sendrecv(mine, peer, other, (comm.rank - 1) % comm.size)
            comm.allreduce(mine)
            comm.broadcast(mine)
            for _ in range(comm.rank + 1):
                comm.compute()
            window.put(mine, peer)
            window.accumulate(mine, peer)
            window.get(other, peer)
            attached = comm.memory.attach(mine)
            attached.put(other, peer)
            comm.barrier()
        window.local.add_(1)
        return mine.tolist(), other.tolist(), window.local.tolist()

    results = run_virtual(body, 4, network=Network(1e-3, 1e3), compute=Constant(1e-3))
    assert results == [([12.0] * 3, [12.0] * 3, [13.0] * 3)] * 4


def test_a_failed_run_leaves_the_state_of_the_process_alone():
    def body(comm):
        draw()
        comm.probe()

    with pytest.raises(DeadlockError):
        run_virtual(body, 3)


# --- a further thread: what it takes in time, its errors, its end ---------------------------------------------------
NETWORK = Network(0.01, 1e9)
SUM_S = 0.04  # a ring of three, four messages


def test_calls_beside_take_no_time_of_the_rank_while_it_computes():
    """And it may wait for the first calls alone."""

    def body(comm):
        channel = comm.split(0)
        queue = channel.queue()
        tensor, times = torch.ones(3), []
        for calls in (1, 3):
            start_s = comm.now()
            works = [queue.submit(lambda: channel.allreduce(tensor)) for _ in range(calls)]
            submitted_s = comm.now()
            comm.compute()
            works[-1].wait()
            times += [submitted_s - start_s, comm.now() - start_s]
        start_s, ended_s = comm.now(), []
        works = [queue.submit(channel.barrier) for _ in range(3)]
        for work in works:
            work.wait()
            ended_s.append(comm.now() - start_s)
        queue.close()
        channel.close()
        return times, ended_s, tensor.tolist()

    for times, ended_s, found in run_virtual(body, 3, network=NETWORK, compute=Constant(0.05)):
        assert times == pytest.approx([0, 0.05, 0, 3 * SUM_S])
        assert ended_s == pytest.approx([0.02, 0.04, 0.06]), "a barrier of three takes two latencies"
        assert found == [81.0] * 3


def test_messages_beside_share_the_ranks_links():
    def body(comm, second):
        channel = comm.split(0)
        queue = channel.queue()
        peer = comm.rank ^ 1
        start_s = comm.now()
        if second:
            work = queue.submit(lambda: channel.sendrecv(torch.zeros(250), peer, torch.zeros(250), peer))
        comm.sendrecv(torch.zeros(250), peer, torch.zeros(250), peer)
        if second:
            work.wait()
        taken_s = comm.now() - start_s
        queue.close()
        return taken_s

    network = Network(0.0, 1e4)
    assert run_virtual(lambda comm: body(comm, False), 2, network=network) == pytest.approx([0.1] * 2)
    assert run_virtual(lambda comm: body(comm, True), 2, network=network) == pytest.approx([0.2] * 2)


def test_an_error_beside_is_raised_where_the_rank_waits():
    def body(comm):
        queue = comm.split(0).queue()
        work = queue.submit(lambda: 1 / 0)
        queue.submit(lambda: pytest.fail("a task after one that failed"))
        with pytest.raises(ZeroDivisionError):
            work.wait()
        queue.submit(lambda: done.append(comm.rank))
        queue.close()

    done = []
    run_virtual(body, 2)
    assert sorted(done) == [0, 1]


def test_a_run_ends_although_nobody_has_closed_the_thread():
    def body(comm):
        channel = comm.split(0)
        channel.queue().submit(channel.barrier)
        comm.compute()
        return comm.now()

    assert run_virtual(body, 2, compute=Constant(1.0)) == [1.0, 1.0]


@each("at_rank_0", [None, lambda channel: channel.allreduce(torch.ones(1))])
def test_a_call_beside_that_not_all_ranks_make_is_a_deadlock_and_a_different_one_is_told(at_rank_0):
    def body(comm):
        channel = comm.split(0)
        queue = channel.queue()
        if call := at_rank_0 if comm.rank == 0 else type(channel).barrier:
            queue.submit(lambda: call(channel)).wait()
        queue.close()

    missing = r"a queue's thread of rank 1 waits since .* barrier: rank 0 missing"
    different = "collective calls must be the same on all ranks"
    with pytest.raises(MismatchError if at_rank_0 else DeadlockError, match=different if at_rank_0 else missing):
        run_virtual(body, 2)


def test_the_thread_draws_from_the_ranks_random_state():
    def body(comm, threaded):
        channel = comm.split(0)
        queue = channel.queue()
        drawn = [random.random()]
        if threaded:
            queue.submit(lambda: drawn.append(random.random())).wait()
        else:
            drawn.append(random.random())
        queue.close()
        return [*drawn, torch.rand(1).item()]

    assert run_virtual(lambda comm: body(comm, True), 3) == run_virtual(lambda comm: body(comm, False), 3)
