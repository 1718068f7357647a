"""NoLoCo: by hand, its means as DiLoCo, how replicas draw together, whom a slow rank holds up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import Constant, Network, Straggler, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.topology import load
from strategies import replicas

pytestmark = pytest.mark.computes

NAME = "noloco"
STEPS = 14


def by_hand(size, *, period, group=2, outer_lr=0.7, outer_momentum=0.5, pull=0.7, seed=0):
    hand, values = replicas.ByHand(size, "adam"), []
    groups = load("random_groups")(size, group=group, seed=seed)
    xs = [own.clone() for own in hand.params]
    velocities = [torch.zeros_like(x) for x in xs]
    for step in range(1, STEPS + 1):
        hand.steps()
        if step % period == 0:
            before, params = [x.clone() for x in xs], [own.clone() for own in hand.params]
            for rank in range(size):
                members = list(groups.in_neighbours(rank, step // period))
                way = sum(params[j] - before[j] for j in members) / len(members)
                apart = sum(before[j] for j in members) / len(members) - before[rank]
                velocities[rank] = outer_momentum * velocities[rank] + outer_lr * way + pull * apart
                xs[rank] = before[rank] + velocities[rank]
                hand.params[rank].copy_(xs[rank])
        values.append(torch.stack(hand.params))
    return torch.stack(values)


@each("options", [{"period": 3}, {"period": 2, "pull": 0.3, "outer_momentum": 0.2, "seed": 4}])
@pytest.mark.sizes(2, 4)
def test_it_does_what_is_done_by_hand(ranks, options):
    found = ranks(lambda comm: replicas.train(comm, NAME, options, "adam", STEPS)[0])
    torch.testing.assert_close(torch.stack(found, dim=1), by_hand(len(found), **options), rtol=0, atol=1e-12)


@pytest.mark.sizes(3, 4)
def test_in_one_group_of_all_it_is_diloco_with_heavy_ball(ranks):
    def body(comm):
        options = {"period": 3, "group": comm.size, "outer_lr": 0.6, "outer_momentum": 0.4}
        own, _ = replicas.train(comm, NAME, options, "adam", STEPS)
        outer = {"outer_lr": 0.6, "outer_momentum": 0.4, "nesterov": False}
        diloco, _ = replicas.train(comm, "diloco", {"period": 3, **outer}, "adam", STEPS)
        torch.testing.assert_close(own, diloco, rtol=0, atol=1e-12)

    ranks(body)


@each("pull", [0.0, 0.7])
@pytest.mark.sizes(4)
def test_the_means_obey_heavy_ball_whatever_the_pairs(ranks, pull):
    period, rate, momentum = 2, 0.7, 0.5

    def body(comm):
        strategy, local = replicas.make(comm, NAME, {"period": period, "pull": pull}, "sgd")
        found = []
        for turn in range(5):
            replicas.go(strategy, local, range(turn * period, turn * period + 1))  # the first step of a period
            before, x, v = strategy.model.params[0].clone(), strategy.outer[0].clone(), strategy._momentum[0].clone()
            replicas.stay(strategy, local)  # nobody moves in the second one
            found.append((before - x, x, v, strategy.outer[0].clone(), strategy._momentum[0].clone()))
        replicas.end(strategy)
        return found

    found = ranks(body)
    for turn in range(5):
        way, x, v, x_after, v_after = (sum(of[turn][i] for of in found) / len(found) for i in range(5))
        torch.testing.assert_close(v_after, momentum * v + rate * way, rtol=0, atol=1e-12)
        torch.testing.assert_close(x_after, x + v_after, rtol=0, atol=1e-12)


@each("case", [(4, 0.7), (8, 0.7), (8, 1.0), (6, 0.3), (4, 0.0)])
def test_pairs_draw_together_at_the_derived_rate(case):
    """Without inner movement and momentum the squared distance from the mean falls, in law, by this factor."""
    size, pull = case
    groups = load("random_groups")(size, seed=1)
    x = np.random.default_rng(0).standard_normal(size)
    x -= x.mean()
    factors = []
    for step in range(4000):
        after = x + pull * (groups.matrix(step) @ x - x)
        factors.append((after @ after) / (x @ x))
    expected = (1 - pull / 2) ** 2 + pull**2 / 4 - pull * (1 - pull / 2) / (size - 1)
    assert np.mean(factors) == pytest.approx(expected, rel=0.04)


def test_a_slow_rank_holds_up_its_partner_only():
    """In the first exchange: the partner ends with the slow rank, all others at once."""

    def body(comm):
        strategy, local = replicas.make(comm, NAME, {"period": 2, "seed": 3}, "sgd")
        start_s = comm.now()
        replicas.go(strategy, local, range(2))
        taken_s = comm.now() - start_s
        replicas.end(strategy)
        return taken_s

    partner = next(j for j in load("random_groups")(4, seed=3).in_neighbours(3, 1) if j != 3)
    network = Network(0.0, math.inf)
    seconds = run_virtual(body, 4, network=network, compute=Straggler(Constant(0.1), 3, 5.0))
    free = [rank for rank in range(3) if rank != partner]
    assert max(seconds[rank] for rank in free) < 0.5 * min(seconds[partner], seconds[3])


@pytest.mark.sizes(2)
def test_bytes_are_two_vectors_to_the_partner(ranks):
    def body(comm):
        strategy, local = replicas.make(comm, NAME, {"period": 3}, "sgd")
        n_bytes = strategy.model.n_bytes
        _, records = replicas.go(strategy, local, range(6))
        replicas.end(strategy)
        return n_bytes, [record.bytes_sent for record in records]

    for n_bytes, sent in ranks(body):
        assert [n // n_bytes for n in sent] == [0, 0, 2] * 2


@pytest.mark.sizes(1, 4)
def test_a_run_taken_up_ends_on_the_same_bits(ranks):
    assert replicas.all_same_when_taken_up(ranks, NAME, {"period": 3}, "adam", (2, 3, 4), STEPS)


@pytest.mark.sizes(4)
def test_a_resumed_job_ends_where_the_uninterrupted_one_ends(ranks, shared_tmp_path):
    assert all(ranks(lambda comm: replicas.same_when_resumed(comm, shared_tmp_path, NAME, ("period=4",), 6)))


@each("case", [(3, 2), (4, 3)])
def test_ranks_that_make_no_groups_are_refused(case):
    size, group = case
    with pytest.raises(ConfigError, match=f"group must divide the number of ranks, {size}; got {group}"):
        run_virtual(lambda comm: replicas.make(comm, NAME, {"group": group}, "sgd"), size)
    assert strategies.load(NAME).Config().group == 2
