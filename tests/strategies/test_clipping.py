"""clip_norm: the norm is of all gradients of an update, on several servers too, and of what is pushed or remembered."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hpcdist as hd
from harness import loops
from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from strategies import problem

pytestmark = pytest.mark.computes

SLOPES = (100.0, 1.0, 1.0)  # the gradient of each step


def _along_slopes(comm, strategy, **options):
    """Three steps of a model of one weight along gradients that are given; the weight of each rank."""
    hd.init(comm=comm)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hd.DistributedOptimizer(optimizer, model, strategy=strategy, clip_norm=1.0, **options)

    def backward(slope):
        model(torch.full((1, 1), slope, dtype=torch.float64)).sum().backward()

    given = {"update": optimizer.attachment.local_step, "take": optimizer.step}
    loops.by_strategy(optimizer.strategy, optimizer, SLOPES, backward, **given)
    weight = model.weight.item()
    hd.finish(model)
    return weight, model.weight.item()


def test_downpours_servers_see_clipped_gradients():
    found = run_virtual(lambda comm: _along_slopes(comm, "downpour", rate=0.5), 2)
    expected = -0.5 * (1 + 1 / math.sqrt(2) + 1 / math.sqrt(3))
    assert all(trained == pytest.approx(expected, rel=1e-4) for _, trained in found), "clipped to 1 + 1e-6 at most"


def test_eamsgds_velocity_is_of_clipped_gradients():
    (_, (ahead, _)) = run_virtual(lambda comm: _along_slopes(comm, "eamsgd", beta=0.0, momentum=0.9, period=1), 2)
    velocity = position = 0.0
    for _ in SLOPES:
        velocity = 0.9 * velocity - 0.1
        position += velocity
    assert ahead == pytest.approx(position + 0.9 * velocity, rel=1e-4)


def _trained(comm, strategy, **options):
    hd.init(comm=comm)
    module = problem.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer = hd.DistributedOptimizer(optimizer, module, strategy=strategy, clip_norm=0.05, **options)
    strategy = optimizer.strategy
    workers = strategy.config.workers(comm.size)

    def backward(step):
        first = (step * len(workers) + workers.index(comm.rank)) * 8
        problem.loss(module, range(first, first + 8)).backward()

    loops.by_strategy(
        strategy, optimizer, range(6), backward, update=optimizer.attachment.local_step, take=optimizer.step
    )
    hd.finish(module)
    return loops.vector(module)


@each("servers", [1, 2, "colocated"])
@pytest.mark.sizes(4)
def test_hardsync_clips_the_mean_gradient_by_the_norm_of_all_of_it(ranks, servers):
    count = 4 if servers == "colocated" else 4 - servers
    found = ranks(lambda comm: _trained(comm, "hardsync", servers=servers))
    module = problem.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    clipped = 0
    for step in range(6):
        optimizer.zero_grad()
        problem.loss(module, range(step * count * 8, (step + 1) * count * 8)).backward()
        clipped += nn.utils.clip_grad_norm_(module.parameters(), 0.05) > 0.05
        optimizer.step()
    expected = loops.vector(module)
    assert clipped == 6
    for params in found:
        torch.testing.assert_close(params, expected, rtol=0, atol=1e-9)
