"""Elastic averaging with momentum: Nesterov's, on each worker, and never exchanged. What it shares: test_easgd.py."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from harness.cases import each
from harness.worlds import HeldRank, resharded
from hpcdist import strategies
from hpcdist.comm.virtual import Exponential, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.session.state import capture_strategy, restore_strategy
from strategies import elastic, problem

NAME = "eamsgd"


def _sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, lr=0.02, **options)


@each("case", itertools.product([(1.0,), (1.0, 0.6), (0.7, 1.9, 1.1)], [1, 3], [(0.0, 0.0), (0.5, 0.1), (0.99, 0.0)]))
def test_it_is_algorithm_2(case):
    """The centre, and the point ahead that each model holds, x + δv; the optimiser's weight decay is of that point."""
    paces, period, (momentum, decay) = case
    steps, rate = 60, 0.05

    def gradient(worker, x):
        return elastic.curved(worker, x) + decay * x

    options = {"period": period, "momentum": momentum}
    found = elastic.run(NAME, options, steps, paces, lr=rate, weight_decay=decay)
    assert len(paces) == 1 or found.order != sorted(found.order), "one after the other"
    centre, workers = elastic.asynchronous(
        found.order, len(paces), steps, period, 0.9, rate, gradient, momentum=momentum
    )
    np.testing.assert_allclose(found.centre, centre, rtol=0, atol=1e-12)
    for held, worker in zip(found.models, workers, strict=True):
        assert worker.steps == steps
        np.testing.assert_allclose(held, worker.x + momentum * worker.v, rtol=0, atol=1e-12)


def test_it_is_stable_where_the_spring_would_throw_a_point_ahead_away():
    """2 workers that exchange at every step, ηh = 1: algorithm 2 converges; pulled at x + δv it diverges."""

    def slope(worker, x):
        return x

    found = elastic.run(NAME, {"period": 1}, 400, (1.0, 0.9), slope, lr=1.0)
    assert np.abs(found.centre).max() < 1e-6 and max(np.abs(held).max() for held in found.models) < 1e-6


@pytest.mark.parametrize("servers", [1, 2, "colocated"])
def test_without_momentum_it_is_easgd(servers):
    size = 3 if servers == "colocated" else 3 + servers
    found = []
    for name, more in ((NAME, {"momentum": 0.0}), ("easgd", {})):
        options = {"servers": servers, "period": 3, **more}
        body = lambda comm, name=name, options=options: problem.train(  # noqa: E731
            comm, name, options, optimizer="sgd", samples=50
        )
        found.append(run_virtual(body, size, compute=Exponential(0.1), seed=5))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.params[0], theirs.params[0], rtol=0, atol=1e-13)
        torch.testing.assert_close(ours.consensus[0], theirs.consensus[0], rtol=0, atol=1e-13)


def test_momentum_without_springs_is_torchs_nesterov():
    """Whose parameters are the point ahead, too."""
    runs = [
        run_virtual(
            lambda comm, name=name, more=more, local=local: problem.train(
                comm, name, {"beta": 0.0, **more}, optimizer=local
            ),
            3,
        )
        for name, more, local in (
            (NAME, {"momentum": 0.9}, _sgd()),
            ("easgd", {}, _sgd(momentum=0.9, nesterov=True)),
        )
    ]
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours.params[0], theirs.params[0], rtol=0, atol=1e-12)


def test_a_state_is_taken_up_with_its_velocity_and_without_one_workers_are_at_rest():
    held = {}

    def body(comm):
        run = problem.make(comm, NAME, problem.model())
        held[comm.rank] = HeldRank(capture_strategy(run))
        comm.barrier()
        saved = run.state()
        moving = {"velocity": [torch.ones_like(v) for v in saved["velocity"]]} if run.is_worker else {}
        run.load_state(saved | moving)
        taken = [v.clone() for v in run.state().get("velocity", [])]
        restore_strategy(run, resharded(run, [held[0], held[1], held[1]])["strategy"])
        if run.is_worker:
            found = taken[0].min().item(), run.state()["velocity"][0].abs().max().item()
            run.pause()
        else:
            found = None
            run.serve(lambda: None)
        run.close()
        return found

    assert run_virtual(body, 2)[1] == (1.0, 0.0)


@pytest.mark.parametrize("momentum", [1.0, -0.1])
def test_momentum_that_never_fades_is_refused(momentum):
    with pytest.raises(ConfigError, match="momentum must be"):
        strategies.load(NAME).Config(momentum=momentum)
