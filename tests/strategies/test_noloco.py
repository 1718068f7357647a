"""NoLoCo: by hand, as DiLoCo, whom a slow rank holds up, in bytes."""

from __future__ import annotations

import math

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Constant, Network, Straggler, run_virtual
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


@each("options", [
    {"period": 3},
    {"period": 2, "pull": 0.3, "outer_momentum": 0.2, "seed": 4},
    {"period": 3, "group": 4, "outer_lr": 0.6},
])  # fmt: skip
@pytest.mark.sizes(4)
def test_it_does_what_is_done_by_hand(ranks, options):
    found = ranks(lambda comm: replicas.train(comm, NAME, options, "adam", STEPS)[0])
    torch.testing.assert_close(torch.stack(found, dim=1), by_hand(len(found), **options), rtol=0, atol=1e-12)


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
        n_bytes = sum(flat.nbytes for flat in strategy.model.params)
        _, records = replicas.go(strategy, local, range(6))
        replicas.end(strategy)
        return n_bytes, [record.bytes_sent for record in records]

    for n_bytes, sent in ranks(body):
        assert [n // n_bytes for n in sent] == [0, 0, 2] * 2
