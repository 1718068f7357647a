"""Dion: the serial rule on the mean gradient, momenta that differ, other parameters by the optimiser, bytes."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from harness import loops
from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.model.flat import FlatModel
from hpcdist.parallel.agreement import Agreement
from hpcdist.train.planning import rehearse
from strategies import problem, replicas

pytestmark = pytest.mark.computes
STEPS, MU, RATE, DECAY = 8, 0.9, 0.05, 0.1


def go(comm, options):
    """Collective. The model's tensors after each step, by name, and the gradients of each."""
    module = problem.model()
    local = torch.optim.SGD(module.parameters(), lr=RATE, weight_decay=DECAY)
    strategy = problem.make(comm, "dion", module, local, momentum=MU, **options)
    values, gradients = [], []
    for step in range(STEPS):
        local.zero_grad()
        replicas.backward(module, comm.rank, comm.size, step)
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
        strategy.step(local.step)
        values.append({name: p.detach().clone() for name, p in module.named_parameters()})
    momentum = [m.clone() for m in strategy._momentum]
    strategy.close()
    return values, gradients, momentum


def serial(means, start_of, matrices=("0.weight", "2.weight")):
    """One process on the mean gradients, with torch's own QR, whose signs of columns cancel in PQᵀ and PRᵀ.

    The rank is at most that of a gradient of four samples, so that no column of R is rounding alone.
    """
    tensors = {name: p.detach().clone() for name, p in problem.model().named_parameters()}
    momenta = {name: torch.zeros_like(tensors[name]) for name in matrices}
    bases, found = {}, []
    for step, grads in enumerate(means):
        for name, x in tensors.items():
            if name not in matrices:
                x -= RATE * (grads[name] + DECAY * x)
                continue
            total = momenta[name] + grads[name]
            q = bases[name] if step else start_of[name].T
            p, _ = torch.linalg.qr(total @ q)
            r = total.T @ p
            momenta[name] = total - (1 - MU) * p @ r.T
            bases[name] = r / r.norm(dim=0)
            x *= 1 - RATE * DECAY
            x -= RATE * (x.shape[0] / x.shape[1]) ** 0.5 * p @ bases[name].T
        found.append({name: x.clone() for name, x in tensors.items()})
    return found, momenta


def starts(fraction):
    """Q of each matrix at the start, as a fresh strategy makes it."""

    def body(comm):
        module = problem.model()
        made = problem.make(comm, "dion", module, torch.optim.SGD(module.parameters(), lr=RATE), fraction=fraction)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return {one.name: made._basis_of(one, one.parameter.detach()) for one in made._divided()[0]}

    return run_virtual(body, 1)[0]


@each("fraction", [0.6, 0.25])
@pytest.mark.sizes(1, 3)
def test_it_is_the_serial_rule_on_the_mean_gradient(ranks, fraction):
    results = ranks(lambda comm: go(comm, {"fraction": fraction}))
    means = [
        {name: sum(r[1][step][name] for r in results) / len(results) for name in results[0][1][0]}
        for step in range(STEPS)
    ]
    expected, momenta = serial(means, starts(fraction))
    for values, *_ in results:
        for own, same, other in zip(values, results[0][0], expected, strict=True):
            assert all(torch.equal(own[name], same[name]) for name in own), "replicas are equal"
            assert all((own[name] - other[name]).abs().max() < 1e-9 for name in own)
    mean = sum(m[0] for *_, m in results) / len(results)
    whole = torch.cat([momenta.get(name, torch.zeros_like(p)).reshape(-1) for name, p in expected[0].items()])
    torch.testing.assert_close(mean, whole, rtol=0, atol=1e-9)
    if len(results) > 1:
        assert (results[0][2][0] - results[1][2][0]).abs().max() > 1e-6, "momenta differ"


@pytest.mark.sizes(2)
def test_all_others_are_the_optimisers(ranks):
    """With every matrix named it is allreduce with the same optimiser, which has no state of matrices elsewhere."""

    def body(comm, name, **options):
        module = problem.model()
        local = torch.optim.AdamW(module.parameters(), lr=0.01)
        strategy = problem.make(comm, name, module, local, **options)
        batches = range(STEPS)
        loops.by_strategy(strategy, local, batches, lambda step: replicas.backward(module, comm.rank, comm.size, step))
        strategy.close()
        return loops.vector(module), [name for name, p in module.named_parameters() if p in local.state]

    def compared(comm):
        return body(comm, "dion", others=("*.weight",))[0] - body(comm, "allreduce", overlap="off")[0]

    assert all(difference.abs().max() < 1e-12 for difference in ranks(compared))
    assert ranks(lambda comm: body(comm, "dion", others=("2.*",))[1])[0] == ["0.bias", "2.weight", "2.bias"]


def moved(comm, module, x, **options):
    """Collective. How one step along the gradient of a sum or mean moves the first parameter, and bytes sent."""
    local = torch.optim.SGD(module.parameters(), lr=0.1)
    strategy = problem.make(comm, "dion", module, local, **options)
    weight = next(module.parameters())
    before, traffic = weight.detach().clone(), strategy.calls.comm.trace.traffic
    module(x).square().mean().backward()
    sent = traffic.bytes_sent
    strategy.step(local.step)
    sent = traffic.bytes_sent - sent
    strategy.close()
    return weight.detach() - before, sent


@pytest.mark.sizes(2)
def test_it_sends_the_factors_of_matrices(ranks):
    module, x = nn.Linear(256, 128, bias=False), torch.randn(4, 256)
    options = {"fraction": 1 / 16, "algorithm": "ring"}
    rank = 128 // 16
    expected = 4 * rank * (256 + 128)  # 2n(p − 1)/p
    basis, word = 4 * rank * 128, 8  # from the rank that has computed it; of agreement
    found = ranks(lambda comm: (moved(comm, deepcopy(module), x, **options)[1], comm.mpi is None))
    sent, (is_virtual, *_) = zip(*found, strict=True)
    if is_virtual:
        assert sent == (expected + basis + word, expected + word)
    else:  # in a node the basis is read from shared memory
        assert all(expected < each <= expected + basis + 5 * word for each in sent), sent


@pytest.mark.sizes(2)
def test_a_direction_that_is_rounding_alone_moves_nothing(ranks):
    """A matrix whose gradient has rank 1, and factors of rank 6."""
    module = nn.Linear(problem.FEATURES, 8, bias=False).double()
    for way, _ in ranks(lambda comm: moved(comm, deepcopy(module), problem.X[:1], fraction=1.0)):
        assert torch.linalg.matrix_rank(way, rtol=1e-6) == 1


@pytest.mark.sizes(2)
def test_convolutions_are_matrices_of_their_first_axis(ranks):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    for way, _ in ranks(lambda comm: moved(comm, deepcopy(module), x)):
        assert torch.linalg.matrix_rank(way.reshape(4, 27)) == 1, "a quarter of the shorter side"


def test_names_are_known_of_frozen_parameters_and_of_other_stages_and_not_asked_for_in_a_rehearsal():
    rehearse(JobConfig.model_validate({"strategy": {"name": "dion", "others": ["0.weight"]}}), 2)

    def step(strategy, local, loss):
        loss.backward()
        strategy.step(local.step)
        strategy.close()

    def body(comm):
        module, cls = problem.model(), strategies.load("dion")
        module[0].requires_grad_(False)
        local = torch.optim.SGD(module[2:].parameters(), lr=RATE)
        made = problem.make(comm, "dion", module, local, others=("0.weight",))
        step(made, local, problem.loss(module, range(4)))
        stage = nn.ModuleDict({str(comm.rank): nn.Linear(2, 2)})
        local = torch.optim.SGD(stage.parameters(), lr=RATE)
        kwargs = {"optimizer": local, "stages": Agreement(comm.split(0))}
        made = cls(cls.Config(others=("1.weight",)), comm.split(comm.rank), FlatModel(stage), **kwargs)
        step(made, local, stage[str(comm.rank)](torch.ones(1, 2)).sum())
        return True

    assert all(run_virtual(body, 2))


@pytest.mark.sizes(2)
def test_a_parameter_of_no_elements_is_left_alone(ranks):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.none, self.wide = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(3, 0))
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(x).sum() + self.none.sum() + self.wide.sum()

    def body(comm):
        torch.manual_seed(1)
        module = Odd()
        local = torch.optim.AdamW(module.parameters(), lr=0.01)
        strategy = problem.make(comm, "dion", module, local)
        before = module.inner.weight.detach().clone()
        for _ in range(2):
            local.zero_grad()
            module(torch.ones(1, 3)).backward()
            strategy.step(local.step)
        strategy.close()
        return bool((module.inner.weight != before).all()), module.none.shape, module.wide.shape

    assert ranks(body) == [(True, (0, 3), (3, 0))] * ranks.size
