"""Loops that compute with gradients, in batches of different sizes: equal to the weighted mean of each rank's loss."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from patterns.run import copied, data, difference, mse, net
from torch.func import functional_call

import hpcdist as hd
from harness.cases import each
from harness.ranks import VirtualRanks
from hpcdist.errors import ConfigError

SIZES, RATE = (5, 2, 1), 0.05  # samples of each worker's batch
X, Y = data(sum(SIZES)).tensors
pytestmark = pytest.mark.filterwarnings("ignore:.*weighted by their numbers")


def penalty(model, x, y):
    """On the norm of the loss's gradient."""
    loss = mse(model(x), y)
    inner = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    (loss + 0.1 * sum(g.square().sum() for g in inner)).backward()


def an_inner_step(model, x, y, second_order=True):
    """As in MAML."""
    named = dict(model.named_parameters())
    inner = torch.autograd.grad(mse(model(x), y), [*named.values()], create_graph=second_order)
    fast = {name: p - 0.1 * g for (name, p), g in zip(named.items(), inner)}
    mse(functional_call(model, fast, (0.9 * x,)), y).backward()


def an_inner_step_of_first_order(model, x, y):
    an_inner_step(model, x, y, second_order=False)


def losses_balanced_by_their_gradients(model, x, y):
    """As in GradNorm."""
    output = model(x)
    (slope,) = torch.autograd.grad(mse(output, y), model[2].weight, retain_graph=True)
    (mse(output, y) + 0.1 * slope.norm() * output.abs().mean()).backward()


def assigned(model, x, y):
    for p, g in zip(model.parameters(), torch.autograd.grad(mse(model(x), y), [*model.parameters()])):
        p.grad = g


def assigned_next_to_a_backward_pass(model, x, y):
    output, head = model(x), [*model[2].parameters()]
    gradients = torch.autograd.grad(mse(output, y), head, retain_graph=True)
    mse(output, y).backward(inputs=[*model[0].parameters()])
    for p, g in zip(head, gradients):
        p.grad = g


def batch(worker):
    first = sum(SIZES[:worker])
    return X[first : first + SIZES[worker]], Y[first : first + SIZES[worker]]


def plain_loop(backward, model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()


def trained(comm, strategy, loop, batches):
    """Collective. The model's parameters after `loop(model, optimizer, loader)` on each worker's `batches(worker)`."""
    hd.init(comm=comm)
    model = net()
    optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, strategy=strategy)
    workers = optimizer.strategy.config.workers(comm.size)
    own = batches(workers.index(comm.rank)) if comm.rank in workers else []
    loop(model, optimizer, hd.shard(own, split=False))
    hd.finish(model)
    return copied(model)


@each("strategy", ["allreduce", "hardsync"])
@each("backward", [penalty, an_inner_step, an_inner_step_of_first_order, losses_balanced_by_their_gradients, assigned])
def test_gradients_that_the_loop_computes_with_have_no_weight(backward, strategy):
    loop, expected = partial(plain_loop, backward), net()
    for worker, size in enumerate(SIZES):
        replica = net()
        backward(replica, *batch(worker))
        for p, own in zip(expected.parameters(), replica.parameters()):
            p.data -= RATE * size / sum(SIZES) * own.grad
    ranks = VirtualRanks(len(SIZES) + (strategy == "hardsync"))
    for found in ranks(lambda comm: trained(comm, strategy, loop, lambda worker: [batch(worker)])):
        assert difference(found, copied(expected)) < 1e-14


def test_a_rank_without_samples_computes_a_second_derivative():
    loop = partial(plain_loop, penalty)
    found = VirtualRanks(2)(lambda comm: trained(comm, "allreduce", loop, lambda worker: [batch(0)] * (2 - worker)))
    alone = net()
    for _ in range(2):
        alone.zero_grad()
        penalty(alone, *batch(0))
        for p in alone.parameters():
            p.data -= RATE * p.grad
    assert difference(found[1], copied(alone)) < 1e-14


def test_a_gradient_assigned_next_to_a_backward_pass_has_the_batchs_weight():
    """Where the strategy averages in its step, not in backward()."""

    results = []
    for backward in (lambda model, x, y: mse(model(x), y).backward(), assigned_next_to_a_backward_pass):
        loop = partial(plain_loop, backward)
        results += VirtualRanks(3)(lambda comm, loop=loop: trained(comm, "demo", loop, lambda worker: [batch(worker)]))
    assert difference(results[0], results[3]) == 0.0


def test_assigned_gradients_of_several_uneven_batches_are_refused():
    def loop(model, optimizer, loader):
        for number, (x, y) in enumerate(loader):
            earlier = [p.grad for p in model.parameters()]
            assigned(model, x, y)
            if number == 1:
                for p, g in zip(model.parameters(), earlier):
                    p.grad += g
                optimizer.step()

    with pytest.raises(ConfigError, match=r"computed by backward\(\) where .* weights; got assigned ones of 2 batches"):
        VirtualRanks(3)(lambda comm: trained(comm, "allreduce", loop, lambda worker: [batch(0), batch(worker)]))
