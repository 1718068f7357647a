"""D², gradient tracking, quasi-global momentum: where ranks' data differ, as the published rules, taken up again."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.settings import Named
from hpcdist.topology import load as load_topology
from strategies import problem, replicas

pytestmark = pytest.mark.computes

STEPS, WIDTH, RATE = 12, 3, 0.1
RINGS = {"topology": Named(name="ring")}


class Point(nn.Module):
    """x, of which each rank's loss is ½‖x − b‖² with b of its own."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))


def targets(size: int) -> torch.Tensor:
    return torch.randn(size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


def descend(comm, name, options, steps, *, rate=lambda step: RATE, **sgd):
    """Collective. x after each step, shape (steps, WIDTH), and the strategy, open."""
    module = Point()
    local = torch.optim.SGD(module.parameters(), lr=RATE, **sgd)
    strategy = problem.make(comm, name, module, local, **options)
    strategy.records.start()
    target, found = targets(comm.size)[comm.rank], []
    for step in range(steps):
        local.param_groups[0]["lr"] = rate(step)
        module.x.grad = module.x.detach() - target
        strategy.step(local.step)
        found.append(module.x.detach().clone())
    return torch.stack(found), strategy


def run(comm, *args, **options):
    found, strategy = descend(comm, *args, **options)
    strategy.close()
    return found


def matrix(topology: str, size: int, step: int = 0, lazy: bool = False) -> torch.Tensor:
    weights = load_topology(topology)(size).matrix(step)
    return torch.from_numpy((weights + np.eye(size)) / 2 if lazy else weights)


# --- by hand ----------------------------------------------------------------------------------------------------------
def d2_by_hand(b, steps, weights, rate):
    x, before, gradients, values = torch.zeros_like(b), None, None, []
    for step in range(steps):
        now = x - b
        if before is None or not rate(step - 1):
            after = weights @ (x - rate(step) * now)
        else:
            last = (before - x) / rate(step - 1) + now - gradients
            after = weights @ (x - rate(step) * last)
        before, gradients, x = x, now, after
        values.append(x)
    return torch.stack(values)


def tracking_by_hand(b, steps, weights_of, order):
    x, y, gradients, values = torch.zeros_like(b), torch.zeros_like(b), torch.zeros_like(b), []
    for step in range(steps):
        weights, now = weights_of(step), x - b
        if order == "before":
            y = weights @ y + now - gradients
            x = weights @ x - RATE * y
        else:
            y = y + now - gradients
            x, y = weights @ (x - RATE * y), weights @ y
        gradients = now
        values.append(x)
    return torch.stack(values)


def qg_by_hand(b, steps, weights_of, momentum, nesterov, decay, memory):
    x, kept, values = torch.zeros_like(b), torch.zeros_like(b), []
    for step in range(steps):
        gradient = x - b + decay * x
        m = momentum * kept + gradient
        after = weights_of(step) @ (x - RATE * (gradient + momentum * m if nesterov else m))
        kept = memory * kept + (1 - memory) * (x - after) / RATE
        x = after
        values.append(x)
    return torch.stack(values)


def same(found, expected):
    torch.testing.assert_close(torch.stack(found, dim=1), expected, rtol=0, atol=1e-12)


@each("case", [("ring", True), ("complete", True), ("complete", False)])
@each("course", ["falls", "rests"])
@pytest.mark.sizes(3, 4)
def test_d2_does_what_is_done_by_hand(ranks, case, course):
    topology, lazy = case

    def rate(step):
        falling = RATE / (1 + step // 3) if course == "falls" else RATE
        return 0.0 if course == "rests" and step in (0, 5, 6) else falling

    found = ranks(lambda comm: run(comm, "d2", {"topology": Named(name=topology), "lazy": lazy}, STEPS, rate=rate))
    size = len(found)
    same(found, d2_by_hand(targets(size), STEPS, matrix(topology, size, lazy=lazy), rate))


@each("topology", ["ring", "one_peer_exponential", "complete"])
@each("order", ["before", "after"])
@pytest.mark.sizes(4)
def test_gradient_tracking_does_what_is_done_by_hand(ranks, topology, order):
    options = {"topology": Named(name=topology), "order": order}
    found = ranks(lambda comm: run(comm, "gradient_tracking", options, STEPS))
    size = len(found)
    same(found, tracking_by_hand(targets(size), STEPS, partial(matrix, topology, size), order))


@each("case", [(0.9, True, 0.0, 0.9), (0.5, False, 0.01, 0.7), (0.0, False, 0.0, 0.9), (0.9, True, 0.1, 0.0)])
@each("topology", ["ring", "one_peer_exponential"])
@pytest.mark.sizes(4)
def test_quasi_global_momentum_does_what_is_done_by_hand(ranks, topology, case):
    momentum, nesterov, decay, memory = case
    options = {"topology": Named(name=topology), "memory": memory}
    sgd = {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
    found = ranks(lambda comm: run(comm, "qg_dsgd", options, STEPS, **sgd))
    size = len(found)
    same(found, qg_by_hand(targets(size), STEPS, partial(matrix, topology, size), momentum, nesterov, decay, memory))


# --- what they are for ------------------------------------------------------------------------------------------------
def test_dpsgd_ends_apart_and_the_others_at_the_optimum_of_all():
    """dpsgd tends to (I − W + ηI)⁻¹ηb; the others to the mean of b on every rank."""
    size, weights = 4, matrix("ring", 4)
    b = targets(size)
    biased = torch.linalg.solve(torch.eye(size, dtype=torch.float64) * (1 + RATE) - weights, RATE * b)
    assert (biased - b.mean(dim=0)).abs().max() > 0.1
    raise_on_all_ranks = b.mean(dim=0).expand(size, -1)
    cases = [
        ("dpsgd", {"overlap": False}, biased),
        ("d2", {}, raise_on_all_ranks),
        ("gradient_tracking", {}, raise_on_all_ranks),
    ]
    for name, options, expected in cases:
        found = run_virtual(lambda comm, n=name, o=options: run(comm, n, RINGS | o, 200), size)
        torch.testing.assert_close(torch.stack(found)[:, -1], expected, rtol=0, atol=1e-6)


def test_a_rate_of_0_leaves_the_momentum():
    def body(comm):
        found, strategy = descend(comm, "qg_dsgd", RINGS, 2, momentum=0.9, rate=lambda step: 0.0)
        momentum = strategy._momentum[0].clone()
        strategy.close()
        return found, momentum

    for found, momentum in run_virtual(body, 2):
        assert not momentum.any() and not found.any()


# --- bytes, checkpoints, refusals -------------------------------------------------------------------------------------
@each("case", [("d2", 1), ("gradient_tracking", 2), ("qg_dsgd", 1)])
def test_bytes_are_so_many_vectors_to_each_neighbour(case):
    name, vectors = case

    def body(comm):
        _, records = replicas.train(comm, name, {"topology": Named(name="ring")}, "momentum", 4)
        return [record.bytes_sent for record in records]

    for sent in run_virtual(body, 5):
        assert len(set(sent[1:])) == 1 and sent[1] % (2 * vectors) == 0
    dpsgd = run_virtual(lambda comm: replicas.train(comm, "dpsgd", {"overlap": False}, "momentum", 4)[1], 5)
    flags = 2 * 2 * 4 * 8 if name == "gradient_tracking" else 0  # two for each of four parameters, to two neighbours
    assert sent[1] == vectors * dpsgd[0][1].bytes_sent + flags
