"""Elastic averaging with momentum: Nesterov's, on each worker, and never exchanged. What it shares: test_easgd.py."""

from __future__ import annotations

import pytest
import torch
from strategies import problem

from hpcdist import strategies
from hpcdist.comm.virtual import Exponential, run_virtual
from hpcdist.errors import ConfigError


def _sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, lr=0.02, **options)


@pytest.mark.parametrize("servers", [1, 2, "colocated"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_with_sgd_it_is_easgd_with_nesterov_to_the_bit(servers, momentum):
    size = 3 if servers == "colocated" else 3 + servers
    nesterov = _sgd(momentum=momentum, nesterov=True) if momentum else _sgd()
    found = []
    for name, options, optimizer in (("eamsgd", {"momentum": momentum}, _sgd()), ("easgd", {}, nesterov)):
        options = {"servers": servers, "period": 3, **options}
        body = lambda comm, name=name, options=options, optimizer=optimizer: problem.train(  # noqa: E731
            comm, name, options, optimizer=optimizer, samples=50
        )
        found.append(run_virtual(body, size, compute=Exponential(0.1), seed=5))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.params[0], theirs.params[0])
        assert torch.equal(ours.consensus[0], theirs.consensus[0])


def test_momentum_moves_further_than_none():
    """Of a constant gradient; the exchange is of x alone, so the centre feels it through x only."""
    steps = []
    for momentum in (0.0, 0.9):
        runs = run_virtual(
            lambda comm, momentum=momentum: problem.train(
                comm, "eamsgd", {"momentum": momentum}, optimizer="sgd", epochs=1
            ),
            4,
        )
        start = problem.FlatModel(problem.model()).params[0]
        steps.append((runs[0].consensus[0] - start).norm().item())
    assert steps[1] > 1.5 * steps[0] > 0


@pytest.mark.parametrize("momentum", [1.0, -0.1])
def test_momentum_that_never_fades_is_refused(momentum):
    with pytest.raises(ConfigError, match="momentum must be"):
        strategies.load("eamsgd").Config(momentum=momentum)
