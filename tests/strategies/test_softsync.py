"""n-softsync: an update for every ⌊λ/n⌋ gradients of anybody, staleness about n, and nobody waits."""

from __future__ import annotations

from functools import partial
from statistics import fmean

import pytest
import torch

from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import Exponential, Jitter
from hpcdist.model.flat import FlatModel
from strategies import problem
from strategies.problem import staleness
from strategies.replay import watched

pytestmark = pytest.mark.computes

NAME = "softsync"
_train = partial(problem.virtual, name=NAME)


# --- staleness --------------------------------------------------------------------------------------------------------
@each("splits", [4, 30])
def test_the_mean_staleness_of_30_workers_is_29_over_c(splits):
    """But for the first rounds, whose gradients are all of the first parameters, and the last ones."""
    epochs = 2
    runs = _train({"splits": splits}, 31, batch=1, epochs=epochs, compute=Jitter(0.1, 0.05))
    gradients, quota = epochs * problem.SAMPLES, 30 // splits
    assert [record.clock for record in runs[0].records] == list(range(1, gradients // quota + 1))
    assert runs[0].pending == gradients % quota
    assert all(len(record.staleness) == quota for record in runs[0].records)
    assert fmean(staleness(runs)[60:-60]) == pytest.approx(29 / (30 // splits), rel=0.05)


# --- updates ----------------------------------------------------------------------------------------------------------


@each("case", [("momentum", {"servers": 2}), ("adam", {"servers": "colocated"}), ("momentum", {"overlap": True})])
def test_n_equal_to_the_workers_is_the_asynchronous_server_to_the_bit(case):
    optimizer, options = case
    size = 6 if options.get("servers") == "colocated" else 4 + options.get("servers", 1)
    workers = size if options.get("servers") == "colocated" else 4
    settings = {"optimizer": optimizer, "samples": 50, "compute": Exponential(0.1), "seed": 2}
    soft = _train({"splits": workers, **options}, size, **settings)
    plain = _train(options, size, name="parameter_server", **settings)
    assert torch.equal(soft[0].consensus[0], plain[0].consensus[0])
    assert staleness(soft) == staleness(plain)


# --- trees ------------------------------------------------------------------------------------------------------------
@each("case", [(7, 2, 4, 1), (13, 3, 4, 2)])
def test_aggregators_sum_as_many_as_make_up_an_update(case):
    size, fan_in, splits, group = case
    found = []  # of how many gradients the requests are that the root gets

    def note(strategy, request):
        if strategy.comm.rank == 0:
            found.append(len(request.clocks))

    name, settings = watched(strategies.load(NAME), note), {"batch": 2, "epochs": 1, "compute": Jitter(0.1, 0.1)}
    runs = _train({"splits": splits, "fan_in": fan_in}, size, name=name, **settings)
    workers = sum(run.is_worker for run in runs)
    quota = workers // splits
    assert set(found) == {group}
    assert all(len(record.staleness) == quota for record in runs[0].records)
    gradients = problem.SAMPLES // 2
    assert len(staleness(runs)) + sum(run.pending for run in runs) == gradients


def test_in_a_tree_the_learning_rate_is_divided_by_n_once():
    """All 4 gradients are of the first parameters: two updates, each of two, at half the rate."""
    start, moved = FlatModel(problem.model()).params[0], {}
    for modulation in ("none", "average"):
        options = {"splits": 2, "fan_in": 2, "modulation": modulation}
        runs = _train(options, 7, optimizer="sgd", samples=16, epochs=1)
        assert sum(run.is_worker for run in runs) == 4 and len(runs[0].records) == 2
        moved[modulation] = runs[0].consensus[0] - start
    torch.testing.assert_close(moved["average"], moved["none"] / 2, rtol=1e-12, atol=1e-15)
