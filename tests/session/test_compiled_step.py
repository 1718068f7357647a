"""`torch.compile` of the optimiser's step, or of a function with the whole step; rates that are no numbers."""

from __future__ import annotations

import pytest
import torch
from patterns.run import copied, data, difference, mse, net
from torch.utils.data import DataLoader

import hpcdist as hd
from harness.cases import each
from harness.ranks import VirtualRanks
from hpcdist.errors import ConfigError
from strategies import problem

pytestmark = [pytest.mark.computes, pytest.mark.filterwarnings("ignore:The optimiser's state is divided")]


def trained(comm, name, compiled=None, make=None):
    """Collective. The model at the end of two epochs."""
    hd.init(comm=comm)
    model, make = net(), make or (lambda parameters: problem.local(name, parameters, 0.003, 0.9))
    options = problem.PERIODS.get(name, {}) | problem.fitting(name, comm.size)
    optimizer = hd.DistributedOptimizer(make(model.parameters()), model, strategy=name, **options)
    step = torch.compile(optimizer.step, backend="eager") if compiled == "step" else optimizer.step

    def whole(x, y):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        step()

    train = torch.compile(whole, backend="eager") if compiled == "all" else whole
    for _ in range(2):
        for x, y in hd.shard(DataLoader(data(32), batch_size=4)):
            train(x, y)
    return copied(hd.finish(model) or model)


@each("name", ["allreduce", "hardsync", "gossip_pull"])  # the compiler looks into none of them
def test_a_compiled_step_is_the_step(name):
    expected = VirtualRanks(2)(lambda comm: trained(comm, name))
    for compiled in ("step", "all"):
        torch._dynamo.reset()
        found = VirtualRanks(2)(lambda comm, how=compiled: trained(comm, name, how))
        assert [difference(*pair) for pair in zip(found, expected, strict=True)] == [0.0] * 2, compiled


class OwnRate(torch.optim.SGD):
    """Finds its own rate, as transformers' Adafactor does: that of its group is None."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.003, momentum=0.0)
        self.param_groups[0]["lr"] = None

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=0.003)


@each("name", [name for name in problem.stepping() if problem.suited(name, None) is None])
def test_a_rate_of_none_works_or_is_refused(name):
    def body(comm):
        return trained(comm, name, make=OwnRate)

    if problem.steps_itself(name):
        with pytest.raises(ConfigError, match=f"lr of the optimiser must be a number with {name}"):
            VirtualRanks(2)(body)
    else:
        assert all(tensor.isfinite().all() for model in VirtualRanks(2)(body) for tensor in model.values())


@each("name", filter(problem.steps_itself, problem.stepping()))
def test_a_rate_in_a_tensor_is_the_number(name):
    """With strategies that step themselves; others are tried in test_patterns.py."""
    kind = problem.suited(name, torch.optim.SGD)

    def end(rate):
        return VirtualRanks(2)(lambda comm: trained(comm, name, make=lambda parameters: kind(parameters, lr=rate())))

    for found, expected in zip(end(lambda: torch.tensor(0.0078125)), end(lambda: 0.0078125), strict=True):
        assert difference(found, expected) <= 1e-12
