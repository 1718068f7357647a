"""Elastic averaging: what the springs give to one side they take from the other, whatever the order of arrival."""

from __future__ import annotations

import pytest
import torch
from strategies import problem

from hpcdist import strategies
from hpcdist.comm.virtual import Exponential, Jitter, Network, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.flat import FlatModel

NAME = "easgd"
BOTH = pytest.mark.parametrize("name", ["easgd", "eamsgd"])
SERVERS = pytest.mark.parametrize("servers", [1, 2, "colocated"])


def _train(options, size, name=NAME, **settings):
    simulation = {key: settings.pop(key) for key in ("compute", "seed", "network") if key in settings}
    return run_virtual(lambda comm: problem.train(comm, name, options, **settings), size, **simulation)


def _mix(comm, options, steps, name=NAME, gradient=0.0, rate=0.0):
    """Training with a given gradient; worker r starts at r + 1, the centre at 0. Its centre and x in the end."""
    module = torch.nn.Linear(5, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(module.weight)
    cls = strategies.load(name)
    channel = comm.split(0)
    strategy = cls(cls.Config(**options), channel, FlatModel(module))
    local = torch.optim.SGD(module.parameters(), lr=rate)
    if strategy.is_worker:
        strategy.model.params[0].add_(torch.arange(1.0, 6.0, dtype=torch.float64) + comm.rank)
        for _ in range(steps):
            comm.compute()
            module.weight.grad = torch.full_like(module.weight, gradient)
            strategy.step(local.step)
        strategy.pause()
    else:
        strategy.serve(local.step)
    before = strategy.model.params[0].clone()
    (centre,) = strategy.consensus()[0]
    untouched = torch.equal(before, strategy.model.params[0])
    strategy.close()
    channel.close()
    return centre, before if strategy.is_worker else torch.zeros(5, dtype=torch.float64), untouched


def _some(servers, size):
    return 1 if servers == 2 and size == 2 else servers


@BOTH
@SERVERS
@pytest.mark.parametrize("compression", ["none", {"name": "topk", "ratio": 0.4}, "onebit"], ids=str)
@pytest.mark.sizes(2, 3, 4, 7)
def test_without_learning_the_centre_plus_all_workers_is_conserved(ranks, name, servers, compression):
    """And evaluating, which takes the centre, changes nobody."""
    options = {"period": 1, "beta": 0.9, "servers": _some(servers, ranks.size), "compression": compression}
    found = ranks(lambda comm: _mix(comm, options, 12, name), compute=Exponential(0.1))
    workers = len(strategies.load(name).worker_ranks(strategies.load(name).Config(**options), ranks.size))
    first = ranks.size - workers
    expected = sum(torch.arange(1.0, 6.0, dtype=torch.float64) + rank for rank in range(first, ranks.size))
    total = found[0][0] + sum(x for _, x, _ in found)
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    assert all(torch.equal(centre, found[0][0]) and untouched for centre, _, untouched in found)
    spread = torch.stack([x for _, x, _ in found[first:]])
    assert (spread - found[0][0]).abs().max() < 7, "nobody has moved"
    assert found[0][0].min() > 0.1


@BOTH
@pytest.mark.parametrize("servers", [1, 2])
def test_one_exchange_is_of_the_old_values_on_both_sides(name, servers):
    """e = a(x − c); x ← x − e − η g, c ← c + e; with momentum δ the first Nesterov step is (1 + δ) g."""
    rate, gradient, beta = 0.1, 3.0, 0.6
    found = run_virtual(
        lambda comm: _mix(comm, {"beta": beta, "servers": servers}, 1, name, gradient, rate), servers + 1
    )
    centre, x, _ = found[-1]
    start = torch.arange(1.0, 6.0, dtype=torch.float64) + servers
    step = rate * gradient * (1.9 if name == "eamsgd" else 1.0)
    torch.testing.assert_close(x, start - beta * start - step, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(centre, beta * start, rtol=1e-15, atol=0)


@pytest.mark.parametrize("period", [1, 3, 7])
def test_it_exchanges_at_every_periodth_step_from_the_first_on(period):
    runs = _train({"period": period}, 4, samples=240, epochs=1)
    assert len(runs[0].records) == 3 * -(-20 // period)
    n_bytes = FlatModel(problem.model()).n_bytes
    for run in runs[1:]:
        exchanged = [record.step for record in run.records if record.bytes_sent > n_bytes]
        assert exchanged == list(range(1, 21, period))
        assert all(record.bytes_sent == 0 for record in run.records if record.step not in exchanged)


@SERVERS
def test_without_springs_the_runs_are_independent_to_the_bit(servers):
    size = 3 if servers == "colocated" else 3 + servers
    runs = _train({"beta": 0.0, "period": 2, "servers": servers}, size, compute=Exponential(0.1), optimizer="adam")
    steps = problem.SAMPLES // 12
    for worker, run in enumerate([run for run in runs if run.is_worker]):
        others = {(w, step) for w in range(3) if w != worker for step in range(steps)}
        assert torch.equal(run.params[0], problem.serial(3, optimizer="adam", leave_out=others)[0])
    start = FlatModel(problem.model()).params[0]
    assert all(torch.equal(run.consensus[0], start) for run in runs), "the centre has moved"


@pytest.mark.parametrize("servers", [1, "colocated"])
def test_a_nan_gradient_is_left_out_and_the_worker_stays_on_its_spring(servers):
    options = {"on_nonfinite": "skip", "period": 1, "servers": servers}
    runs = _train(options, 4, poison={(0, 2)}, epochs=1, compute=Jitter(0.1, 0.2))
    assert all(torch.isfinite(run.consensus[0]).all() for run in runs)
    first = next(run for run in runs if run.is_worker)
    assert [record.step for record in first.records if record.event] == [3]
    assert first.records[2].staleness == () and first.records[3].staleness == (0,)


@pytest.mark.parametrize("beta", [-0.1, 2.0])
def test_a_spring_that_throws_the_centre_away_is_refused(beta):
    with pytest.raises(ConfigError, match="beta must be"):
        strategies.load(NAME).Config(beta=beta)


@BOTH
@SERVERS
@pytest.mark.sizes(2, 3, 4)
def test_it_learns_and_all_ranks_agree_on_the_centre(ranks, name, servers):
    options = {"servers": _some(servers, ranks.size), "period": 2}

    problem.learns(ranks, name, options, epochs=8, compute=Jitter(0.1, 0.2), network=Network(1e-4, 1e9))
