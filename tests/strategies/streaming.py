"""Streaming DiLoCo on a model of five layers."""

from __future__ import annotations

import torch
from torch import nn

from hpcdist import strategies
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.synchronous.fragments import cut
from strategies import problem, replicas

NAME = "streaming_diloco"
DEEP = 5  # layers


def deep() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [nn.Linear(problem.FEATURES, problem.FEATURES) for _ in range(DEEP - 1)]
        return nn.Sequential(*layers, nn.Linear(problem.FEATURES, 2)).double()


def make(comm, options, optimizer="momentum"):
    module = deep()
    local = problem.OPTIMIZERS[optimizer](module.parameters())
    cls = strategies.load(NAME)
    strategy = cls(cls.Config(algorithm="ring", **options), comm.split(0), FlatModel(module))
    strategy.optimizer = local
    strategy.records.start()
    return strategy, local


def train(comm, options, optimizer="momentum", steps=14):
    strategy, local = make(comm, options, optimizer)
    found = []
    for step in range(steps):
        replicas.go(strategy, local, range(step, step + 1))
        found.append([strategy.model.params[0].clone(), *(x[0].clone() for x in (strategy.common, strategy._momentum))])
    replicas.end(strategy)
    return found


def fragments_of(options):
    """The elements of each fragment."""
    model = FlatModel(deep())
    numbers = [torch.arange(len(model.params[0]))]
    return [one.take(numbers)[0] for one in cut(model, options["fragment_layers"], options.get("order", "strided"))]
