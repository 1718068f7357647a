"""n-softsync: an update for every ⌊λ/n⌋ gradients of anybody, staleness about n, and nobody waits."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from operator import itemgetter
from statistics import fmean

import pytest
import torch

from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import Constant, Exponential, Jitter, Straggler
from hpcdist.model.flat import FlatModel
from strategies import problem
from strategies.problem import staleness
from strategies.replay import watched

pytestmark = pytest.mark.computes

NAME = "softsync"
_train = partial(problem.virtual, name=NAME)


# --- staleness --------------------------------------------------------------------------------------------------------
@each("splits", [1, 15, 30])
def test_the_mean_staleness_of_30_workers_is_29_over_c(splits):
    """But for the first rounds, whose gradients are all of the first parameters, and the last ones."""
    epochs = 2
    runs = _train({"splits": splits}, 31, batch=1, epochs=epochs, compute=Jitter(0.1, 0.05))
    gradients, quota = epochs * problem.SAMPLES, 30 // splits
    assert len(runs[0].records) == gradients // quota and runs[0].pending == gradients % quota
    assert all(len(record.staleness) == quota for record in runs[0].records)
    assert fmean(staleness(runs)[60:-60]) == pytest.approx(29 / (30 // splits), rel=0.05)


@each("splits", [1, 4])
def test_staleness_stays_below_2n_for_workers_of_about_equal_speed(splits):
    settings = {"batch": 1, "epochs": 1}
    even = _train({"splits": splits}, 9, compute=Jitter(0.1, 0.1), **settings)  # nearly all within 20 %
    assert max(staleness(even)) <= 2 * splits
    uneven = _train({"splits": splits}, 9, compute=Straggler(Jitter(0.1, 0.1), 3, 4.0), **settings)
    assert max(staleness(uneven)) > 2 * splits, "the bound is not the protocol's, and must be seen to be exceeded"


# --- updates ----------------------------------------------------------------------------------------------------------
@each("case", [(4, 1, 4), (7, 3, 2), (7, 7, 1)])
def test_an_update_takes_its_quota_from_whoever_comes(case):
    workers, splits, quota = case
    arrived = []  # at which clock of the server, from whom

    def note(strategy, request):
        if request.weight:
            arrived.append((strategy.replica.clock, request.source))

    watching, slow = watched(strategies.load(NAME), note), Straggler(Constant(0.1), 1, 3.0)
    _train({"splits": splits}, workers + 1, name=watching, batch=1, epochs=1, compute=slow)
    updates = [[source for _, source in group] for _, group in groupby(arrived, key=itemgetter(0))]
    assert {len(sources) for sources in updates} == {quota}
    assert len(updates) == problem.SAMPLES // quota
    if quota > 1:
        assert any(len(set(sources)) < quota for sources in updates), "one worker may give two gradients of one update"
        assert any(1 not in sources for sources in updates), "another none"


@each("optimizer", ["momentum", "adam"])
@each("options", [{"servers": 2}, {"servers": "colocated"}, {"overlap": True}])
def test_n_equal_to_the_workers_is_the_asynchronous_server_to_the_bit(optimizer, options):
    size = 6 if options.get("servers") == "colocated" else 4 + options.get("servers", 1)
    workers = size if options.get("servers") == "colocated" else 4
    settings = {"optimizer": optimizer, "samples": 50, "compute": Exponential(0.1), "seed": 2}
    soft = _train({"splits": workers, **options}, size, **settings)
    plain = _train(options, size, name="parameter_server", **settings)
    assert torch.equal(soft[0].consensus[0], plain[0].consensus[0])
    assert staleness(soft) == staleness(plain)


@each("servers", [1, "colocated"])
def test_gradients_without_an_update_wait_for_the_next_epoch(servers):
    """5 workers, c = 2, 13 gradients an epoch: 6 updates and one left, then 7."""
    size = 5 if servers == "colocated" else 5 + servers
    settings = {"batch": 4, "samples": 49, "compute": Jitter(0.1, 0.2)}
    once = _train({"splits": 2, "servers": servers}, size, epochs=1, **settings)
    twice = _train({"splits": 2, "servers": servers}, size, epochs=2, **settings)
    for run in (once[0], twice[0]):
        assert len(run.staleness) == (13 if run is once[0] else 26) - run.pending
    assert (once[0].pending, twice[0].pending) == (1, 0)


# --- trees ------------------------------------------------------------------------------------------------------------
@each("case", [(7, 2, 4, 1), (15, 2, 2, 4), (13, 3, 4, 2), (16, 4, 2, 3)])
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


@each("case", [(7, 2, 1, 1), (15, 2, 2, 2)])
def test_a_tree_adds_less_than_n_of_staleness_per_level(case):
    size, fan_in, splits, levels = case
    settings = {"batch": 1, "epochs": 1, "compute": Jitter(0.1, 0.1)}
    runs = _train({"splits": splits, "fan_in": fan_in}, size, **settings)
    flat = _train({"splits": splits}, sum(run.is_worker for run in runs) + 1, **settings)
    more = fmean(staleness(runs)) - fmean(staleness(flat))
    assert 0 < more < levels * splits


def test_in_a_tree_the_learning_rate_is_divided_by_n_once():
    """All 4 gradients are of the first parameters: two updates, each of two, at half the rate."""
    start, moved = FlatModel(problem.model()).params[0], {}
    for modulation in ("none", "average"):
        options = {"splits": 2, "fan_in": 2, "modulation": modulation}
        runs = _train(options, 7, optimizer="sgd", samples=16, epochs=1)
        assert sum(run.is_worker for run in runs) == 4 and len(runs[0].records) == 2
        moved[modulation] = runs[0].consensus[0] - start
    torch.testing.assert_close(moved["average"], moved["none"] / 2, rtol=1e-12, atol=1e-15)


@each("options", [{}, {"servers": 2}, {"servers": "colocated"}, {"fan_in": 4}])
def test_the_rate_is_divided_by_the_staleness_that_each_server_measures(options):
    """About n = 4; on one server, on each of several, at the root of a tree."""

    class Noting(strategies.load(NAME)):
        rates = []

        def __init__(self, *args, **given):
            super().__init__(*args, **given)
            if self.place.children:
                self._updated, self.loop.handler.policy.updated = self.loop.handler.policy.updated, self._note

        def _note(self, staleness):
            policy = self.loop.handler.policy
            self.rates.append((policy.factor(0), fmean(policy.measured.state() or [0])))
            self._updated(staleness)

    settings = {"batch": 1, "epochs": 1, "compute": Jitter(0.1, 0.1)}
    size = 8 if options.get("servers") == "colocated" else 9 + options.get("servers", 1)
    _train({"splits": 4, "modulation": "measured", **options}, size, name=Noting, **settings)
    assert len(Noting.rates) > 100
    assert all(rate == 1 / max(1, measured) for rate, measured in Noting.rates)
    assert 1 / 12 < min(rate for rate, _ in Noting.rates) < 1 / 2


# --- what is refused --------------------------------------------------------------------------------------------------


def test_on_one_rank_any_number_of_splits_is_the_plain_optimiser():
    (run,) = _train({"splits": 30}, 1)
    assert torch.equal(run.params[0], problem.serial(1)[0])
