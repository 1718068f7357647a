"""Synchronous gossip: one permutation for all, the mean conserved to rounding, distances halved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from strategies import mixed

pytestmark = pytest.mark.computes

NAME = "gossip_sync"


def _mix(comm, steps, seed=0, **options):
    """Gossip without learning: each rank's parameters at the start and after each step, and the consensus."""
    strategy = mixed.linear(comm, NAME, seed=seed, **options)
    (params,) = strategy.model.params
    params.copy_(mixed.drawn(100 * seed + comm.rank))
    values = [params.clone()]
    for _ in range(steps):
        strategy.step(lambda: None)
        values.append(params.clone())
    consensus = strategy.consensus()[0][0]
    assert torch.equal(params, values[-1]), "evaluating changed the parameters"
    strategy.close()
    return torch.stack(values), consensus


@each("options", [{}, {"pairing": "matching"}, {"pairing": "matching", "interval": 4}])
@pytest.mark.sizes(1, 4, 7)
def test_the_mean_is_conserved_to_rounding_and_pairs_become_equal_to_the_bit(ranks, options):
    found = ranks(lambda comm: _mix(comm, 20, **options))
    values, interval = torch.stack([values for values, _ in found]), options.get("interval", 1)
    mean = values.mean(dim=0)
    assert (mean - mean[0]).abs().max() < 1e-14
    assert all(torch.allclose(consensus, mean[0], rtol=0, atol=1e-14) for _, consensus in found)
    assert len(found) == 1 or not torch.equal(values[:, 0], values[:, -1])
    for step, sources in enumerate(mixed.sources(ranks, 20, **options) if len(found) > 1 else (), 1):
        before, after = values[:, step - 1], values[:, step]
        if step % interval:
            assert torch.equal(before, after)
        else:
            assert torch.equal(after, (before + before[sources]) * 0.5)
            assert "pairing" not in options or torch.equal(after, after[sources])


@each("options", [{}, {"pairing": "matching"}, {"include_self": False}])
@each("size", [4, 5])
def test_a_step_averages_along_one_uniform_permutation_or_in_disjoint_pairs(size, options):
    """A matching leaves one out of an odd number; a permutation leaves nobody alone without `include_self`."""
    steps, met = 120, np.zeros((size, size))
    for sources in mixed.sources(lambda body: run_virtual(body, size), steps, **options):
        assert sorted(sources) == list(range(size))
        if "pairing" in options:
            assert all(sources[source] == rank for rank, source in enumerate(sources))
            assert sum(source == rank for rank, source in enumerate(sources)) == size % 2
        met[np.arange(size), sources] += 1
    alone = {"pairing": size % 2 == 1, "include_self": False}[next(iter(options))] if options else True
    chance = 1 / (size if alone else size - 1)
    possible = met[~np.eye(size, dtype=bool) | alone]
    assert alone or not met.diagonal().any()
    assert (np.abs(possible - steps * chance) <= 5 * (steps * chance * (1 - chance)) ** 0.5).all()


def test_the_living_go_on_without_a_rank_that_has_died():
    def body(comm):
        strategy = mixed.linear(comm, NAME)
        strategy.model.params[0].fill_(comm.rank)
        strategy.comm.failures.alive = (0, 2, 3)
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
