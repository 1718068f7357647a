"""Elastic averaging: what the springs give to one side they take from the other, whatever the order of arrival."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdist import strategies
from hpcdist.comm.virtual import Exponential, Jitter, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from strategies import elastic, problem

pytestmark = pytest.mark.computes

NAME = "easgd"
BOTH = pytest.mark.parametrize("name", ["easgd", "eamsgd"])
TOPK = {"name": "topk", "ratio": 0.4}
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


@BOTH
@SERVERS
@pytest.mark.parametrize(
    ("compression", "synchronous"),
    [("none", False), ("none", True), (TOPK, False), (TOPK, True), ("onebit", False)],
    ids=str,
)
@pytest.mark.sizes(2, 5)
def test_without_learning_the_centre_plus_all_workers_is_conserved(ranks, name, servers, compression, synchronous):
    """And evaluating, which takes the centre, changes nobody."""
    servers = 1 if servers == 2 and ranks.size == 2 else servers
    options = {"period": 1, "servers": servers, "compression": compression, "synchronous": synchronous}
    found = ranks(lambda comm: _mix(comm, options, 12, name), compute=Exponential(0.1))
    workers = len(strategies.load(name).Config(**options).workers(ranks.size))
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
    """e = a(x − c); x ← x − e − η g, c ← c + e; with momentum δ the model then holds x + δv, v being −η g."""
    rate, gradient, beta = 0.1, 3.0, 0.6
    found = run_virtual(
        lambda comm: _mix(comm, {"beta": beta, "servers": servers}, 1, name, gradient, rate), servers + 1
    )
    centre, x, _ = found[-1]
    start = torch.arange(1.0, 6.0, dtype=torch.float64) + servers
    step = rate * gradient * (1.9 if name == "eamsgd" else 1.0)
    torch.testing.assert_close(x, start - beta * start - step, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(centre, beta * start, rtol=1e-15, atol=0)


@pytest.mark.parametrize("paces", [(1.0,), (1.0, 0.6), (0.7, 1.9, 1.1)], ids=len)
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_it_is_algorithm_1_with_weight_decay_at_the_old_x(paces, period, decay):
    def gradient(worker, x):
        return elastic.curved(worker, x) + decay * x

    steps, rate = 60, 0.05
    found = elastic.run(NAME, {"period": period}, steps, paces, lr=rate, weight_decay=decay)
    centre, workers = elastic.asynchronous(found.order, len(paces), steps, period, 0.9, rate, gradient)
    np.testing.assert_allclose(found.centre, centre, rtol=0, atol=1e-13)
    for held, worker in zip(found.models, workers, strict=True):
        np.testing.assert_allclose(held, worker.x, rtol=0, atol=1e-13)


@BOTH
@pytest.mark.parametrize("optimizer", ["adam", "momentum"])  # with decoupled and with common weight decay
def test_every_optimisers_step_is_from_the_old_x(name, optimizer):
    """It sees the parameters as the gradient's computation left them, also at an exchange."""
    seen, left = [], []

    def body(comm):
        def noting(parameters):
            local = problem.OPTIMIZERS[optimizer](parameters)
            held = [p for group in local.param_groups for p in group["params"]]
            local.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.detach().flatten() for p in held])))
            held[0].register_hook(lambda _: left.append(torch.cat([p.detach().flatten() for p in held])))
            return local

        return problem.train(comm, name, {"period": 1}, optimizer=noting, samples=40, epochs=1)

    run_virtual(body, 3, compute=Exponential(0.1))
    assert len(seen) == len(left) == 10
    assert all(any(torch.equal(at, computed) for computed in left) for at in seen)


# --- all at once ------------------------------------------------------------------------------------------------------
@BOTH
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("paces", [(1.0,), (1.0, 0.6), (0.7, 1.9, 1.1)], ids=len)
def test_all_at_once_it_is_the_papers_synchronous_form(name, paces, period):
    steps, rate, momentum = 60, 0.05, 0.9 if name == "eamsgd" else 0.0
    found = elastic.run(name, {"period": period, "synchronous": True}, steps, paces, lr=rate)
    centre, workers = elastic.synchronous(len(paces), steps, period, 0.9, rate, elastic.curved, momentum)
    np.testing.assert_allclose(found.centre, centre, rtol=0, atol=1e-12)
    for held, worker in zip(found.models, workers, strict=True):
        np.testing.assert_allclose(held, worker.x + momentum * worker.v, rtol=0, atol=1e-12)


@BOTH
@SERVERS
@pytest.mark.parametrize("compression", ["none", TOPK], ids=str)
def test_all_at_once_the_order_of_arrival_changes_no_bit(name, servers, compression):
    options = {"synchronous": True, "period": 2, "servers": servers, "compression": compression}
    size = 4 if servers == "colocated" else 4 + servers
    first, *others = (_train(options, size, name=name, compute=Exponential(0.1), seed=seed) for seed in range(2))
    for runs in others:
        for run, expected in zip(runs, first, strict=True):
            assert torch.equal(run.consensus[0], expected.consensus[0])
            assert torch.equal(run.params[0], expected.params[0])


def test_all_at_once_who_ends_early_holds_nobody_up_and_the_last_to_come_is_named():
    def body(comm):
        module = torch.nn.Linear(5, 1, bias=False)
        cls, channel = strategies.load(NAME), comm.split(0)
        strategy = cls(cls.Config(period=1, synchronous=True), channel, FlatModel(module))
        local, records = torch.optim.SGD(module.parameters(), lr=0.1), []
        if strategy.is_worker:
            for _ in range(3 if comm.rank == 1 else 6):
                comm.compute()
                module.weight.grad = torch.ones_like(module.weight)
                records.append(strategy.step(local.step))
            strategy.pause()
        else:
            strategy.serve(local.step)
        clock = strategy.replica.clock
        strategy.close()
        channel.close()
        return clock, records

    found = run_virtual(body, 4, compute=elastic.Paces((1.0, 1.0, 1.0, 3.0)))
    assert found[0][0] == 6, "one move of the centre for each meeting"
    assert [len(records) for _, records in found[1:]] == [3, 6, 6]
    for record in found[2][1]:
        assert set(record.waited_for) == {3} and record.waited_for[3] == pytest.approx(2.0, rel=0.01)
    assert not any(record.waited_for for record in found[3][1])


@BOTH
@pytest.mark.sizes(3)
def test_all_at_once_it_learns(ranks, name):
    problem.learns(ranks, name, {"synchronous": True, "period": 2}, epochs=8, compute=Jitter(0.1, 0.2))


# --- when and with whom -----------------------------------------------------------------------------------------------
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
