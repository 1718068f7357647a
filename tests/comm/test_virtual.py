"""The scheduler of the virtual cluster: who runs when, time, compute models, collective calls, refusals."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Constant, Exponential, Jitter, Network, Straggler, run_virtual
from hpcdist.errors import CommunicationError, ConfigError, MismatchError

SIZES = (1, 2, 7)


# --- who runs when ----------------------------------------------------------------------------------------------------
@each("size", SIZES)
def test_one_rank_runs_at_a_time_and_always_the_earliest(size):
    running, times = [], []

    def body(comm):
        for _ in range(20):
            running.append(comm.rank)
            times.append(comm.now())
            time.sleep(0)  # invites other threads to break in
            assert running[-1] == comm.rank
            comm.compute()

    run_virtual(body, size, compute=Exponential(1.0))
    assert len(times) == 20 * size
    assert times == sorted(times)


def test_ranks_ready_at_the_same_time_take_turns_and_the_earliest_goes_on_without_a_switch():
    def body(comm):
        for _ in range(4):
            turns.append(comm.rank)
            comm.compute()

    for compute, expected in ((None, [0, 1] * 4), (Straggler(Constant(1.0), 1, 10.0), [0, 1, 0, 0, 0, 1, 1, 1])):
        turns = []
        run_virtual(body, 2, compute=compute)
        assert turns == expected


@each("size", SIZES)
def test_an_effect_is_seen_by_all_actions_at_its_time_or_later_and_by_none_before(size):
    network = Network(0.5, float("inf"))

    def body(comm):
        seen = []
        if comm.rank == 0:
            for peer in range(1, size):
                comm.isend(torch.ones(1), peer)
        for _ in range(3):
            seen.append(comm.probe(0, block=False) is not None)  # at 0, 0.25 and 0.5 s; arrival is at 0.5 s
            comm.compute()
        return seen

    results = run_virtual(body, size, network=network, compute=Constant(0.25))
    assert results[1:] == [[False, False, True]] * (size - 1)


# --- determinism ------------------------------------------------------------------------------------------------------
def busy_body(comm):
    """A bit of everything, with races whose outcome depends on the order of events."""
    trace, clock = [], comm.window(1, torch.int64)
    order = torch.Generator().manual_seed(comm.rank)
    for step in range(5):
        trace.append((comm.compute(), comm.now()))
        trace.append(clock.fetch_add(1, 0))
        peer = int(torch.randint(comm.size, (1,), generator=order))
        comm.isend(torch.randn(peer + 1), peer, tag=step)
        while (envelope := comm.probe(block=False)) is not None:
            message = torch.zeros(envelope.n_bytes // 4)
            comm.irecv(message, envelope.source, envelope.tag).wait()
            trace.append((envelope, message.tolist()))
    noise = torch.randn(4)
    comm.allreduce(noise)
    return trace, noise.tolist(), comm.now(), comm.trace.traffic, np.random.rand(), random.random()


@each("size", [1, 5])
@each("compute", [Jitter(1.0, 0.2), Exponential(1e-3)])
def test_equal_seeds_give_equal_runs(size, compute):
    network = Network(1e-4, 1e6)
    first, second = (run_virtual(busy_body, size, seed=3, network=network, compute=compute) for _ in range(2))
    assert first == second
    other = run_virtual(busy_body, size, seed=4, network=network, compute=compute)
    assert all(ours[2] != theirs[2] and ours[1] != theirs[1] for ours, theirs in zip(first, other))


def test_a_run_does_not_depend_on_what_the_process_did_before():
    first = run_virtual(busy_body, 3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.rand(3), random.random(), np.random.rand(3)
    second = run_virtual(busy_body, 3)
    torch.set_rng_state(states[0]), random.setstate(states[1]), np.random.set_state(states[2])
    assert first == second


# --- time -------------------------------------------------------------------------------------------------------------
def test_compute_advances_the_clock_of_its_rank_by_what_it_returns():
    def body(comm):
        times = [comm.now()]
        for _ in range(5):
            seconds = comm.compute()
            times.append(comm.now())
            assert times[-1] == times[-2] + seconds
        return times

    runs = run_virtual(body, 3, compute=Straggler(Constant(0.5), 2, 4.0))
    assert runs == [[0.5 * k for k in range(6)]] * 2 + [[2.0 * k for k in range(6)]]
    assert len({times[-1] for times in run_virtual(body, 8, compute=Jitter(1.0, 0.1))}) == 8
    assert run_virtual(body, 2) == [[0.0] * 6] * 2
    assert run_virtual(lambda comm: comm.compute(), 2, compute=Jitter(0.3, 0.0)) == [0.3, 0.3]
    turned = run_virtual(lambda comm: comm.split(0, key=-comm.rank).compute(), 3, compute=Straggler(Constant(1), 2, 3))
    assert turned == [1.0, 1.0, 3.0], "a part draws from the same model"


@pytest.mark.parametrize("model, mean_s, cv", [(Jitter(0.3, 0.2), 0.3, 0.2), (Exponential(2.0), 2.0, 1.0)])
def test_compute_models_have_the_mean_and_the_variation_they_promise(model, mean_s, cv):
    draws = np.array(run_virtual(lambda comm: [comm.compute() for _ in range(4000)], 2, compute=model))
    assert (draws > 0).all()
    assert draws.mean() == pytest.approx(mean_s, rel=0.05)
    assert draws.std() / draws.mean() == pytest.approx(cv, rel=0.05)
    assert not np.array_equal(draws[0], draws[1])


# --- barrier ----------------------------------------------------------------------------------------------------------
@each("size", SIZES)
def test_nobody_leaves_a_barrier_before_all_have_come(size):
    log = []

    def body(comm):
        for step in range(3):
            comm.compute()
            log.append(("came", step))
            comm.barrier()
            log.append(("left", step))

    run_virtual(body, size, compute=Jitter(1.0, 1.0))
    assert log == [(what, step) for step in range(3) for what in ("came", "left") for _ in range(size)]


# --- calls that don't match -------------------------------------------------------------------------------------------
SUM = (lambda c: c.allreduce(torch.zeros(3)), "allreduce of 3 x torch.float32")
DIFFERENT = [  # pairs of calls, each with the words that errors have for it
    (SUM, (lambda c: c.barrier(), "barrier")),
    (SUM, (lambda c: c.allreduce(torch.zeros(4)), "allreduce of 4 x torch.float32")),
    (SUM, (lambda c: c.allreduce(torch.zeros(3).double()), "allreduce of 3 x torch.float64")),
    (
        (lambda c: c.broadcast(torch.zeros(3), 0), "broadcast of 3 x torch.float32 from root 0"),
        (lambda c: c.broadcast(torch.zeros(3), 1), "broadcast of 3 x torch.float32 from root 1"),
    ),
    ((lambda c: c.window(1), "window of torch.float32"), (lambda c: c.window(1, torch.int8), "window of torch.int8")),
    (
        (lambda c: c.memory.attach(torch.zeros(3)), "attach of 3 x torch.float32"),
        (lambda c: c.memory.attach(torch.zeros(2)), "attach of 2 x torch.float32"),
    ),
    ((lambda c: c.split(0), "split"), (lambda c: c.gather(b""), "gather")),
    ((lambda c: c.close(), "close"), (lambda c: c.window(0).close(), "window of torch.float32")),
]


@each("calls", DIFFERENT)
@each("size", [2, 3])
def test_calls_that_do_not_match_are_refused_with_both_and_their_lines(calls, size):
    (ours, our_name), (theirs, their_name) = calls
    with pytest.raises(MismatchError) as raised:
        run_virtual(lambda comm: (ours if comm.rank < size - 1 else theirs)(comm), size)
    line = f"at {__file__}:"
    first, second = str(raised.value).split(" and ", 1)
    assert first.startswith(f"collective calls must be the same on all ranks; got {our_name} on rank 0, {line}")
    assert second.startswith(f"{their_name} on rank {size - 1}, {line}")
    assert second.endswith("Make the same calls in the same order, with the same lengths and dtypes, on every rank.")


# --- refused arguments ------------------------------------------------------------------------------------------------
REFUSED = [
    (lambda: Constant(-1), "seconds must be a finite number of at least 0; got -1"),
    (lambda: Constant(float("nan")), "seconds must be .* got nan"),
    (lambda: Jitter(0, 0.1), "mean_s must be a finite number above 0; got 0"),
    (lambda: Jitter(1, -0.1), "cv must be a finite number of at least 0 .*; got -0.1"),
    (lambda: Exponential(float("inf")), "mean_s must be a finite number above 0; got inf"),
    (lambda: Straggler(1.0, 0, 2), "base must be a compute model; got 1.0"),
    (lambda: Straggler(Constant(1), -1, 2), "rank must be an integer of at least 0; got -1"),
    (lambda: Straggler(Constant(1), 0, 0), "factor must be a finite number above 0; got 0"),
    (lambda: Network(-1e-6, 1), "latency_s must be a finite number of at least 0; got -1e-06"),
    (lambda: Network(0, 0), "bandwidth_bytes_s must be a number above 0 .*; got 0"),
    (lambda: Network(0, 1, 0), "ranks_per_node must be an integer of at least 1, or None; got 0"),
    (lambda: Network(0, 1, 2, -1.0), "intra_latency_s must be a finite number of at least 0; got -1.0"),
    (lambda: Network(0, 1, 2, 0, -2), "intra_bandwidth_bytes_s must be a number above 0 .*; got -2"),
    (lambda: run_virtual(print, 0), "size must be an integer of at least 1; got 0"),
    (lambda: run_virtual(print, 2, seed=-1), "seed must be an integer of at least 0; got -1"),
    (lambda: run_virtual(print, 2, network=1e-6), "network must be a Network or None; got 1e-06"),
    (lambda: run_virtual(print, 2, compute=1.0), "compute must be a compute model or None; got 1.0"),
    (
        lambda: run_virtual(print, 2, compute=Straggler(Straggler(Constant(1), 2, 2), 0, 2)),
        r"rank of Straggler must be one of the run's 2 ranks, 0\.\.1; got 2",
    ),
]


@each("case", REFUSED)
def test_arguments_that_break_a_rule_are_refused(case):
    make, message = case
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_compute_model_that_draws_nonsense_is_refused():
    class Backwards(Constant):
        def sample(self, rank, generator):
            return -1.0

    with pytest.raises(ConfigError, match="seconds sampled by a compute model must be finite and at least 0; got -1.0"):
        run_virtual(lambda comm: comm.compute(), 1, compute=Backwards(1.0))


def test_nested_runs_are_refused():
    def body(comm):
        run_virtual(print, 2)

    with pytest.raises(CommunicationError, match="must not be called during another run .* 'virtual rank 0'"):
        run_virtual(body, 1)


def test_a_communicator_is_refused_to_other_ranks_and_threads_and_after_the_run():
    comms = run_virtual(lambda comm: comm, 2)
    with pytest.raises(CommunicationError, match="that of rank 1 was used in thread 'MainThread' while no rank ran"):
        comms[1].barrier()

    def body(comm):
        comms[comm.rank] = comm
        comm.barrier()
        if comm.rank == 0:
            comms[1].compute()

    with pytest.raises(CommunicationError, match="that of rank 1 was used .* while rank 0 ran"):
        run_virtual(body, 2)

    def elsewhere(comm):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(comm.barrier).result()

    with pytest.raises(CommunicationError, match="that of rank 0 was used in thread 'ThreadPool.* while rank 0 ran"):
        run_virtual(elsewhere, 2)
