"""Synchronous gossip: one permutation for all, the mean conserved to rounding, distances halved."""

from __future__ import annotations

import math

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Constant, Straggler, run_virtual
from hpcdist.model.flat import FlatModel
from strategies import problem

pytestmark = pytest.mark.computes

NAME = "gossip_sync"


def _make(comm, **options):
    return problem.make(comm, NAME, torch.nn.Linear(3, 2, dtype=torch.float64), **options)


def _mix(comm, steps, seed=0):
    """Gossip without learning: each rank's parameters at the start and after each step, and the consensus."""
    strategy = _make(comm, seed=seed)
    (params,) = strategy.model.params
    generator = torch.Generator().manual_seed(100 * seed + comm.rank)
    params.copy_(torch.randn(len(params), generator=generator, dtype=params.dtype))
    values = [params.clone()]
    for _ in range(steps):
        strategy.step(lambda: None)
        values.append(params.clone())
    consensus = strategy.consensus()[0][0]
    assert torch.equal(params, values[-1]), "evaluating changed the parameters"
    strategy.close()
    return torch.stack(values), consensus


@pytest.mark.sizes(1, 2, 3, 4, 7)
def test_the_mean_is_conserved_to_rounding(ranks):
    found = ranks(lambda comm: _mix(comm, 30))
    mean = sum(values for values, _ in found) / len(found)
    assert (mean - mean[0]).abs().max() < 1e-14
    for values, consensus in found:
        assert torch.allclose(consensus, mean[0], rtol=0, atol=1e-14)
        assert len(found) == 1 or not torch.equal(values[-1], values[0])


@pytest.mark.sizes(2, 3, 4, 7)
def test_the_mean_follows_the_mean_of_the_local_updates(ranks):
    """Ranks without samples in the last step of an epoch included: those do not move, but take part."""

    def body(comm):
        noting, moved = problem.noting(lr=0.1)
        run = problem.train(comm, NAME, optimizer=noting, samples=50)
        return run.params[0], run.consensus[0], moved

    found = ranks(body)
    start = FlatModel(problem.model()).params[0]
    expected = start + sum(moved for *_, moved in found) / len(found)
    assert (expected - start).abs().max() > 0.1
    assert torch.allclose(sum(params for params, *_ in found) / len(found), expected, rtol=0, atol=1e-13)
    for params, consensus, _ in found:
        assert torch.allclose(consensus, expected, rtol=0, atol=1e-13)
        assert (params - expected).abs().max() > 1e-6, "replicas agree: nothing was local"


@pytest.mark.sizes(2, 3, 4, 5)
def test_a_step_averages_along_one_uniform_permutation(ranks):
    """Rank r brings 2^r, so that the average tells whose it is."""
    steps = 200

    def body(comm):
        strategy, found = _make(comm), []
        for _ in range(steps):
            strategy.model.params[0].fill_(2.0**comm.rank)
            strategy.step(lambda: None)
            found.append(strategy.model.params[0][0].item())
        strategy.close()
        return found

    found = ranks(body)
    size = len(found)
    counts = torch.zeros(size, size)
    for averages in zip(*found, strict=True):
        sources = [round(math.log2(2 * average - 2.0**rank)) for rank, average in enumerate(averages)]
        assert sorted(sources) == list(range(size))
        for rank, source in enumerate(sources):
            counts[rank, source] += 1
    deviation = (steps / size * (1 - 1 / size)) ** 0.5
    assert ((counts - steps / size).abs() < 5 * deviation).all()


@each("size", [3, 6, 16])
def test_the_squared_distance_to_the_mean_is_halved_in_expectation(size):
    """With x the distances and P the permutation, E‖(I + P)x/2‖² = ‖x‖²/2, for E[P] = 11ᵀ/p."""
    ratios = []
    for seed in range(12):
        values = torch.stack([v for v, _ in run_virtual(lambda comm, seed=seed: _mix(comm, 12, seed), size)])
        squares = (values - values.mean(dim=0)).square().sum(dim=(0, 2))
        ratios += (squares[1:] / squares[:-1]).tolist()
    mean = sum(ratios) / len(ratios)
    error = (sum((r - mean) ** 2 for r in ratios) / (len(ratios) - 1) / len(ratios)) ** 0.5
    assert abs(mean - 0.5) < 4 * error
    assert error < 0.03


@pytest.mark.sizes(2, 4)
def test_a_run_taken_up_draws_the_permutations_that_it_would_have_drawn(ranks):
    def body(comm):
        values, _ = _mix(comm, 9, seed=2)
        strategy = _make(comm, seed=2)
        strategy.model.params[0].copy_(values[5])
        strategy.load_state({"steps": 5})
        for _ in range(4):
            strategy.step(lambda: None)
        again = strategy.model.params[0].clone()
        strategy.close()
        return torch.equal(again, values[9])

    assert all(ranks(body))


def test_all_ranks_go_at_the_pace_of_the_slowest():
    """Given a few steps, for a permutation that leaves a rank alone lets it go ahead."""

    def body(comm):
        strategy = _make(comm)
        start = comm.now()
        for _ in range(20):
            comm.compute()
            strategy.step(lambda: None)
        took_s = comm.now() - start
        strategy.close()
        return took_s

    taken_s = run_virtual(body, 5, compute=Straggler(Constant(0.1), 2, 8.0))
    assert min(taken_s) > 0.8 * 16


def test_bytes_are_one_parameter_vector_per_foreign_draw():
    size = 4
    runs = run_virtual(lambda comm: problem.train(comm, NAME, epochs=4, tells=False), size)
    sent = [record.bytes_sent for run in runs for record in run.records]
    assert set(sent) == {0, runs[0].params[0].nbytes}
    assert abs(sent.count(0) / len(sent) - 1 / size) < 0.15


def test_the_living_go_on_without_a_rank_that_has_died():
    def body(comm):
        strategy = _make(comm)
        strategy.model.params[0].fill_(comm.rank)
        strategy.comm.failures.living = (0, 2, 3)
        if comm.rank != 1:
            for _ in range(20):
                strategy.step(lambda: None)
        value = strategy.model.params[0][0].item()
        strategy.close()
        return value

    first, dead, *others = run_virtual(body, 4)
    assert dead == 1
    assert first + sum(others) == pytest.approx(0 + 2 + 3, abs=1e-14)
    assert max(abs(value - 5 / 3) for value in (first, *others)) < 0.1
