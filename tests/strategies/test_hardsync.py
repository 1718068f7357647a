"""Hardsync: the all-reduce through a server. Nothing is stale, everyone waits, sums are in rank order."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Constant, Exponential, Straggler
from strategies import problem

pytestmark = pytest.mark.computes

_train = partial(problem.virtual, name="hardsync")
OPTIMIZERS = each("optimizer", ["momentum", "adam"])


@OPTIMIZERS
@each("workers", [2, 7])
@each("servers", [1, 3, "colocated"])
def test_it_equals_allreduce_in_rank_order_to_the_bit_and_nothing_is_stale(optimizer, workers, servers):
    settings = {"optimizer": optimizer, "samples": 50}  # some workers have fewer in the last step, or none
    size = workers if servers == "colocated" else workers + servers
    runs = _train({"servers": servers}, size, compute=Exponential(0.1), **settings)
    reduced = _train({"algorithm": "native"}, workers, name="allreduce", **settings)
    assert all(torch.equal(run.consensus[0], reduced[0].params[0]) for run in runs)
    assert all(torch.equal(run.params[0], reduced[0].params[0]) for run in runs if run.is_worker)
    assert set(problem.staleness(runs)) == {0}


@each("case", [(2, 5), (3, 13)])
def test_a_tree_equals_one_process_to_rounding(case):
    fan_in, size = case
    settings = {"batch": 2, "samples": 101, "epochs": 2}
    runs = _train({"fan_in": fan_in}, size, compute=Exponential(0.1), **settings)
    workers = sum(run.is_worker for run in runs)
    assert workers < size - 1, "no aggregator: the test shows nothing"
    (expected,) = problem.serial(workers, **settings)
    for run in runs:
        torch.testing.assert_close(run.consensus[0], expected, rtol=0, atol=1e-12)
    assert set(runs[0].staleness) == {0}
    assert len(runs[0].staleness) == 2 * (101 // (2 * workers) * workers + -(-(101 % (2 * workers)) // 2))


@each("case", [({"servers": 2}, 5), ({"servers": "colocated"}, 3), ({"fan_in": 2}, 6)])
def test_a_nan_gradient_is_left_out_and_the_others_are_averaged(case):
    """Of worker 1 in step 4; in step 7 nobody has a gradient that counts."""
    options, size = case
    poison = {(1, 3), (0, 6), (1, 6), (2, 6)}
    settings = {"epochs": 1, "batch": 4, "samples": 120}
    runs = _train({**options, "on_nonfinite": "skip"}, size, compute=Exponential(0.1), poison=poison, **settings)
    workers = [run for run in runs if run.is_worker]
    assert len(workers) == 3
    (expected,) = problem.serial(3, leave_out=poison, **settings)
    for run in runs:
        torch.testing.assert_close(run.consensus[0], expected, rtol=0, atol=1e-12)
    skipped = [[record.step for record in run.records if record.event] for run in workers]
    assert skipped == [[7], [4, 7], [7]]


def test_everyone_waits_for_the_slowest():
    steps = problem.SAMPLES // (3 * 4)
    runs = _train({}, 4, epochs=1, compute=Straggler(Constant(0.1), 2, 5.0))
    assert runs[0].seconds == pytest.approx(0.5 * steps, rel=1e-6)
    waiting = [sum(record.waiting_s for record in run.records) for run in runs]
    assert waiting[1] == waiting[3] == pytest.approx(0.4 * steps, rel=1e-6)
    assert waiting[2] == pytest.approx(0.0, abs=1e-6)
    assert all(len(run.records) == steps for run in runs)
