"""DiLoCo: its defaults, against local SGD, and taken up by another number of ranks with its outer momentum."""

from __future__ import annotations

import pytest
import torch

from harness import worlds
from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from strategies import replicas

pytestmark = pytest.mark.computes

NAME = "diloco"
STEPS = 14


def test_the_defaults_are_those_of_the_paper():
    config = strategies.load(NAME).Config()
    assert (config.period, config.outer_lr, config.outer_momentum, config.nesterov) == (500, 0.7, 0.9, True)


@each("overlap", [False, True])
@pytest.mark.sizes(1, 2, 3, 4)
def test_with_an_outer_rate_of_1_and_no_momentum_it_is_parameter_averaging_to_the_bit(ranks, overlap):
    same = {"period": 3, "overlap": overlap}

    def body(comm):
        outer = {"outer_lr": 1.0, "outer_momentum": 0.0}
        own, _ = replicas.train(comm, NAME, {**same, **outer}, "adam", STEPS)
        averaging, _ = replicas.train(comm, "local_sgd", same, "adam", STEPS)
        return torch.equal(own, averaging)

    assert all(ranks(body))


# --- taken up again ---------------------------------------------------------------------------------------------------
@each("options", [{}, {"overlap": True}])
@each("after", [1, 2, 5])
@each("at", [3, 4])
def test_another_number_of_ranks_goes_on_with_the_outer_momentum_and_what_was_done_in_the_period(options, after, at):
    """Where no rank moves from then on, both worlds make the same outer steps. One rank alone makes none."""

    def make(comm):
        return replicas.make(comm, NAME, {"period": 3, **options}, "adam")

    def stay(strategy, local):
        local.param_groups[0]["lr"] = 0.0
        for _ in range(4):
            replicas.stay(strategy, local)
        found = strategy.consensus()[0][0]
        replicas.end(strategy)
        return found

    def save(comm):
        strategy, local = make(comm)
        replicas.go(strategy, local, range(at))
        saved = worlds.saved(strategy)
        return saved, strategy.consensus()[0][0], stay(strategy, local)

    states, means, expected = zip(*run_virtual(save, 3), strict=True)

    def load(comm):
        strategy, local = make(comm)
        worlds.take_up(strategy, states)
        return stay(strategy, local)

    assert (means[0] - expected[0]).abs().max() > 1e-3
    for found in run_virtual(load, after):
        torch.testing.assert_close(found, expected[0] if after > 1 else means[0], rtol=0, atol=1e-12)
