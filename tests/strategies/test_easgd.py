"""Elastic averaging: what springs give to one side they take from the other, in any order of arrival; with momentum."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from harness import loops
from harness.cases import each
from harness.worlds import HeldRank, resharded
from hpcdist import strategies
from hpcdist.comm.virtual import Exponential, run_virtual
from hpcdist.session.state import capture_strategy, restore_strategy
from strategies import elastic, problem

pytestmark = pytest.mark.computes

NAME = "easgd"
_train = partial(problem.virtual, name=NAME)
BOTH = each("name", ["easgd", "eamsgd"])
TOPK = {"name": "topk", "ratio": 0.4}


def _mix(comm, options, steps, name):
    """Steps without a gradient; worker r starts at r + 1, the centre at 0. Its centre and x in the end."""
    module = torch.nn.Linear(5, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(module.weight)
    strategy = problem.make(comm, name, module, **options)
    if strategy.is_worker:
        strategy.model.params[0].add_(torch.arange(1.0, 6.0, dtype=torch.float64) + comm.rank)

    def backward(step):
        module.weight.grad = torch.zeros_like(module.weight)

    loops.by_strategy(strategy, torch.optim.SGD(module.parameters(), lr=0.1), range(steps), backward)
    before = strategy.model.params[0].clone()
    (centre,) = strategy.consensus()[0]
    untouched = torch.equal(before, strategy.model.params[0])
    strategy.close()
    return centre, before if strategy.is_worker else torch.zeros(5, dtype=torch.float64), untouched


@BOTH
@each("more", [
    {},
    {"servers": 2, "synchronous": True},
    {"servers": 2, "compression": TOPK},
    {"servers": "colocated", "compression": TOPK, "synchronous": True},
    {"servers": "colocated", "compression": "onebit"},
])  # fmt: skip
@pytest.mark.sizes(4)
def test_without_learning_the_centre_plus_all_workers_is_conserved(ranks, name, more):
    """And evaluating, which takes the centre, changes nobody."""
    options = {"period": 1, **more}
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


# --- all at once ------------------------------------------------------------------------------------------------------
@BOTH
@each("period", [1, 3])
@each("paces", [(1.0,), (0.7, 1.9, 1.1)])
def test_all_at_once_it_is_the_papers_synchronous_form(name, paces, period):
    steps, rate, momentum = 30, 0.05, 0.9 if name == "eamsgd" else 0.0
    found = elastic.run(name, {"period": period, "synchronous": True}, steps, paces, lr=rate)
    centre, workers = elastic.synchronous(len(paces), steps, period, 0.9, rate, elastic.curved, momentum)
    np.testing.assert_allclose(found.centre, centre, rtol=0, atol=1e-12)
    for held, worker in zip(found.models, workers, strict=True):
        np.testing.assert_allclose(held, worker.x + momentum * worker.v, rtol=0, atol=1e-12)


@each(
    "case", [("easgd", 2, TOPK), ("easgd", "colocated", "none"), ("eamsgd", 2, "none"), ("eamsgd", "colocated", TOPK)]
)
def test_all_at_once_the_order_of_arrival_changes_no_bit(case):
    name, servers, compression = case
    options = {"synchronous": True, "period": 2, "servers": servers, "compression": compression}
    size = 4 if servers == "colocated" else 4 + servers
    settings = {"samples": 80, "compute": Exponential(0.1)}
    first, second = (_train(options, size, name=name, seed=seed, **settings) for seed in range(2))
    for run, expected in zip(first, second, strict=True):
        assert torch.equal(run.consensus[0], expected.consensus[0])
        assert torch.equal(run.params[0], expected.params[0])


def test_all_at_once_who_ends_early_holds_nobody_up_and_the_last_to_come_is_named():
    def body(comm):
        module = torch.nn.Linear(5, 1, bias=False)
        strategy = problem.make(comm, NAME, module, period=1, synchronous=True)

        def backward(step):
            module.weight.grad = torch.ones_like(module.weight)

        steps, local = range(3 if comm.rank == 1 else 6), torch.optim.SGD(module.parameters(), lr=0.1)
        records = loops.by_strategy(strategy, local, steps, backward)
        clock = strategy.replica.clock
        strategy.close()
        return clock, records

    found = run_virtual(body, 4, compute=elastic.Paces((1.0, 1.0, 1.0, 3.0)))
    assert found[0][0] == 6, "one move of the centre for each meeting"
    assert [len(records) for _, records in found[1:]] == [3, 6, 6]
    for record in found[2][1]:
        assert set(record.waited_for) == {3} and record.waited_for[3] == pytest.approx(2.0, rel=0.01)
    assert not any(record.waited_for for record in found[3][1])


# --- with momentum: eamsgd --------------------------------------------------------------------------------------------


@each("period", [1, 3])
@each("case", [("easgd", 0.0, 0.3), ("eamsgd", 0.0, 0.1), ("eamsgd", 0.5, 0.1), ("eamsgd", 0.99, 0.0)])
def test_it_is_algorithm_1_and_with_momentum_2(case, period):
    """The centre, and the point ahead that each model holds, x + δv; the optimiser's weight decay is of that point."""
    name, momentum, decay = case
    steps, rate, paces = 30, 0.05, (0.7, 1.9, 1.1)

    def gradient(worker, x):
        return elastic.curved(worker, x) + decay * x

    options = {"period": period, **({"momentum": momentum} if name == "eamsgd" else {})}
    found = elastic.run(name, options, steps, paces, lr=rate, weight_decay=decay)
    assert found.order != sorted(found.order), "one after the other"
    centre, workers = elastic.asynchronous(
        found.order, len(paces), steps, period, 0.9, rate, gradient, momentum=momentum
    )
    np.testing.assert_allclose(found.centre, centre, rtol=0, atol=1e-12)
    for held, worker in zip(found.models, workers, strict=True):
        assert worker.steps == steps
        np.testing.assert_allclose(held, worker.x + momentum * worker.v, rtol=0, atol=1e-12)


def test_a_state_is_taken_up_with_its_velocity_and_without_one_workers_are_at_rest():
    held = {}

    def body(comm):
        run = problem.make(comm, "eamsgd", problem.model())
        held[comm.rank] = HeldRank(capture_strategy(run))
        comm.barrier()
        saved = run.state.save()
        moving = {"velocity": [torch.ones_like(v) for v in saved["velocity"]]} if run.is_worker else {}
        run.state.load(saved | moving)
        taken = [v.clone() for v in run.state.save().get("velocity", [])]
        restore_strategy(run, resharded(run, [held[0], held[1], held[1]])["strategy"])
        if run.is_worker:
            found = taken[0].min().item(), run.state.save()["velocity"][0].abs().max().item()
            run.pause()
        else:
            found = None
            run.serve(lambda: None)
        run.close()
        return found

    assert run_virtual(body, 2)[1] == (1.0, 0.0)
