"""Dion: the serial rule on the mean gradient, momenta that differ, other parameters by the optimiser, bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcdist import strategies
from hpcdist.config import JobConfig
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.parallel.agreement import Agreement
from hpcdist.train.planning import rehearse
from strategies import problem, replicas

pytestmark = pytest.mark.computes
STEPS, MU, RATE, DECAY = 8, 0.9, 0.05, 0.1


def go(comm, options, steps=STEPS, make=None, after=lambda strategy: None):
    """Collective. The model's tensors after each step, by name, and the gradients of each."""
    module = problem.model()
    local = (make or (lambda p: torch.optim.SGD(p, lr=RATE, weight_decay=DECAY)))(module.parameters())
    cls = strategies.load("dion")
    strategy = cls(cls.Config(**{"momentum": MU, **options}), comm.split(0), FlatModel(module), optimizer=local)
    values, gradients = [], []
    for step in range(steps):
        local.zero_grad()
        replicas.backward(module, comm.rank, comm.size, step)
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
        strategy.step(local.step)
        values.append({name: p.detach().clone() for name, p in module.named_parameters()})
        after(strategy)
    momentum = [m.clone() for m in strategy._momentum]
    strategy.close()
    return values, gradients, momentum


def serial(means, fraction, start_of, matrices=("0.weight", "2.weight")):
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
    from hpcdist.comm.virtual import run_virtual

    def body(comm):
        cls, module = strategies.load("dion"), problem.model()
        local = torch.optim.SGD(module.parameters(), lr=RATE)
        made = cls(cls.Config(fraction=fraction), comm, FlatModel(module), optimizer=local)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return {one.name: made._basis_of(one, one.parameter.detach()) for one in made._divided()[0]}

    return run_virtual(body, 1)[0]


@pytest.mark.parametrize("fraction", [0.6, 0.5, 0.25])
@pytest.mark.sizes(1, 2, 3)
def test_it_is_the_serial_rule_on_the_mean_gradient(ranks, fraction):
    results = ranks(lambda comm: go(comm, {"fraction": fraction}))
    means = [
        {name: sum(r[1][step][name] for r in results) / len(results) for name in results[0][1][0]}
        for step in range(STEPS)
    ]
    expected, momenta = serial(means, fraction, starts(fraction))
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
    """With every matrix named it is allreduce with the same optimiser."""

    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    results = ranks(lambda comm: go(comm, {"others": ("*.weight",)}, make=adam))

    def reduced(comm):
        module = problem.model()
        local = adam(module.parameters())
        cls = strategies.load("allreduce")
        made = cls(cls.Config(overlap="off"), comm.split(0), FlatModel(module), optimizer=local)
        for step in range(STEPS):
            local.zero_grad()
            replicas.backward(module, comm.rank, comm.size, step)
            made.step(local.step)
        made.close()
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    expected = ranks(reduced)[0]
    assert all((results[0][0][-1][name] - expected[name]).abs().max() < 1e-12 for name in expected)


@pytest.mark.sizes(2)
def test_the_optimiser_has_state_of_others_alone(ranks):
    def body(comm):
        module = problem.model()
        local = torch.optim.AdamW(module.parameters(), lr=0.01)
        cls = strategies.load("dion")
        strategy = cls(cls.Config(others=("2.*",)), comm.split(0), FlatModel(module), optimizer=local)
        replicas.backward(module, comm.rank, comm.size, 0)
        strategy.step(local.step)
        names = {p: name for name, p in module.named_parameters()}
        found = sorted(names[p] for p in local.state)
        strategy.close()
        return found

    assert ranks(body) == [["0.bias", "2.bias", "2.weight"]] * 2


@pytest.mark.sizes(2)
def test_it_sends_the_factors_of_matrices(ranks):
    def body(comm):
        module = nn.Linear(256, 128, bias=False)
        local = torch.optim.SGD(module.parameters(), lr=0.1)
        cls = strategies.load("dion")
        strategy = cls(cls.Config(fraction=1 / 16, algorithm="ring"), comm.split(0), FlatModel(module), optimizer=local)
        module(torch.randn(4, 256)).square().mean().backward()
        traffic = strategy.exchanges.channel.trace.traffic
        before = traffic.bytes_sent
        strategy.step(local.step)
        sent = traffic.bytes_sent - before
        strategy.close()
        return sent

    rank = 128 // 16
    assert ranks(body) == [4 * rank * (256 + 128)] * 2  # 2n(p − 1)/p


@pytest.mark.sizes(3)
def test_a_resumed_job_ends_on_the_same_bits(ranks, shared_tmp_path):
    assert all(ranks(lambda comm: replicas.same_when_resumed(comm, shared_tmp_path, "dion", ("fraction=0.5",), 6)))


@pytest.mark.sizes(2)
def test_a_direction_that_is_rounding_alone_moves_nothing(ranks):
    """A matrix whose gradient has rank 1, and factors of rank 6."""

    def body(comm):
        module = nn.Linear(problem.FEATURES, 8, bias=False).double()
        nn.init.zeros_(module.weight)
        local = torch.optim.SGD(module.parameters(), lr=0.1)
        cls = strategies.load("dion")
        strategy = cls(cls.Config(fraction=1.0), comm.split(0), FlatModel(module), optimizer=local)
        module(problem.X[:1]).sum().backward()
        strategy.step(local.step)
        strategy.close()
        return torch.linalg.matrix_rank(module.weight.detach(), rtol=1e-6).item()

    assert ranks(body) == [1] * 2


@pytest.mark.sizes(2)
def test_convolutions_are_matrices_of_their_first_axis(ranks):
    def body(comm):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double()
        local = torch.optim.SGD(module.parameters(), lr=0.1)
        cls = strategies.load("dion")
        strategy = cls(cls.Config(), comm.split(0), FlatModel(module), optimizer=local)
        before = module[0].weight.detach().clone()
        module(torch.randn(2, 3, 4, 4, dtype=torch.float64)).square().mean().backward()
        strategy.step(local.step)
        strategy.close()
        moved = (module[0].weight.detach() - before).reshape(4, -1)
        return moved.shape[1], torch.linalg.matrix_rank(moved).item()

    assert ranks(body) == [(27, 1)] * 2  # a quarter of the shorter side


def test_it_needs_an_optimiser_for_the_others():
    from hpcdist.comm.virtual import run_virtual

    def body(comm):
        cls, module = strategies.load("dion"), problem.model()
        strategy = cls(cls.Config(), comm, FlatModel(module))
        problem.loss(module, range(4)).backward()
        strategy.step(lambda: None)

    with pytest.raises(ConfigError, match="the optimiser of dion must be one of torch's, .*; got none"):
        run_virtual(body, 1)


@pytest.mark.parametrize("others", [("head.weight",), ("*.weight", "embed*")])
def test_a_name_that_matches_nothing_is_refused_at_the_first_step(others):
    from hpcdist.comm.virtual import run_virtual

    with pytest.raises(
        ConfigError, match=r"strategy.others must name parameters, .* none of 0.weight, 0.bias, 2.weight"
    ):
        run_virtual(lambda comm: go(comm, {"others": others}, steps=1), 2)


def test_a_rehearsal_knows_no_names():
    strategy = {"name": "dion", "others": ["0.weight"]}
    rehearse(JobConfig.model_validate({"strategy": strategy}), 2)


def test_names_of_frozen_parameters_and_of_other_stages_are_known():
    from hpcdist.comm.virtual import run_virtual

    def body(comm):
        module, cls = problem.model(), strategies.load("dion")
        module[0].requires_grad_(False)
        local = torch.optim.SGD(module[2:].parameters(), lr=RATE)
        made = cls(cls.Config(others=("0.weight",)), comm.split(0), FlatModel(module), optimizer=local)
        problem.loss(module, range(4)).backward()
        made.step(local.step)
        made.close()
        stage = nn.ModuleDict({str(comm.rank): nn.Linear(2, 2)})
        local = torch.optim.SGD(stage.parameters(), lr=RATE)
        given = {"optimizer": local, "stages": Agreement(comm.split(0))}
        made = cls(cls.Config(others=("1.weight",)), comm.split(comm.rank), FlatModel(stage), **given)
        stage[str(comm.rank)](torch.ones(1, 2)).sum().backward()
        made.step(local.step)
        made.close()
        return True

    assert all(run_virtual(body, 2))


@pytest.mark.sizes(1, 2)
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
        module, cls = Odd(), strategies.load("dion")
        local = torch.optim.AdamW(module.parameters(), lr=0.01)
        strategy = cls(cls.Config(), comm.split(0), FlatModel(module), optimizer=local)
        before = module.inner.weight.detach().clone()
        for _ in range(2):
            local.zero_grad()
            module(torch.ones(1, 3)).backward()
            strategy.step(local.step)
        strategy.close()
        return bool((module.inner.weight != before).all()), module.none.shape, module.wide.shape

    assert ranks(body) == [(True, (0, 3), (3, 0))] * ranks.size
