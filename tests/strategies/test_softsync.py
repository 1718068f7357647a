"""n-softsync: an update for every ⌊λ/n⌋ gradients of anybody, staleness about n, and nobody waits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hpcdist import strategies
from hpcdist.comm.virtual import Constant, Exponential, Jitter, Network, Straggler, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from strategies import problem
from strategies.watched import watched

pytestmark = pytest.mark.computes

NAME = "softsync"


def _train(options, size, name=NAME, **settings):
    simulation = {key: settings.pop(key) for key in ("compute", "seed", "network") if key in settings}
    return run_virtual(lambda comm: problem.train(comm, name, options, **settings), size, **simulation)


def _staleness(runs):
    return [s for run in runs for s in run.staleness]


def _mean(values):
    return sum(values) / len(values)


# --- staleness --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("splits", "mean"), [(1, 29 / 30), (15, 14.5), (30, 29.0)])
def test_the_mean_staleness_of_30_workers_is_29_over_c(splits, mean):
    """But for the first rounds, whose gradients are all of the first parameters, and the last ones."""
    epochs = 2
    runs = _train({"splits": splits}, 31, batch=1, epochs=epochs, compute=Jitter(0.1, 0.05))
    staleness, gradients = _staleness(runs), epochs * problem.SAMPLES
    quota = 30 // splits
    assert len(runs[0].records) == gradients // quota and runs[0].pending == gradients % quota
    assert all(len(record.staleness) == quota for record in runs[0].records)
    settled = staleness[60:-60]
    assert _mean(settled) == pytest.approx(mean, rel=0.05)


def test_1_softsync_is_not_hardsync():
    """Staleness 0, 1 and 2, since nobody waits; and another trajectory."""
    settings = {"compute": Jitter(0.1, 0.1), "epochs": 1, "batch": 1}
    runs = _train({"splits": 1}, 9, **settings)
    hard = _train({}, 9, name="hardsync", **settings)
    counts = Counter(_staleness(runs))
    assert set(counts) <= {0, 1, 2} and counts[1] > 0.5 * sum(counts.values())
    assert not torch.equal(runs[0].consensus[0], hard[0].consensus[0])
    assert runs[0].seconds < hard[0].seconds


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_staleness_stays_below_2n_for_workers_of_about_equal_speed(splits):
    settings = {"batch": 1, "epochs": 1}
    even = _train({"splits": splits}, 9, compute=Jitter(0.1, 0.1), **settings)  # nearly all within 20 %
    assert max(_staleness(even)) <= 2 * splits
    uneven = _train({"splits": splits}, 9, compute=Straggler(Jitter(0.1, 0.1), 3, 4.0), **settings)
    assert max(_staleness(uneven)) > 2 * splits, "the bound is not the protocol's, and must be seen to be exceeded"


def test_a_bound_of_staleness_holds_under_a_straggler():
    options = {"splits": 4, "max_staleness": 8}
    runs = _train(options, 9, batch=1, compute=Straggler(Jitter(0.1, 0.2), 3, 6.0), epochs=1)
    dropped = sum(record.dropped for record in runs[0].records)
    posted = sum(len(run.records) for run in runs[1:])
    assert dropped > 0 and max(_staleness(runs)) <= 8
    assert len(_staleness(runs)) + dropped + runs[0].pending == posted


@pytest.mark.parametrize("splits", [2, 4])
def test_overlap_costs_n_updates_of_staleness(splits):
    means = []
    for overlap in (False, True):
        options = {"splits": splits, "overlap": overlap}
        runs = _train(options, 9, batch=1, epochs=1, compute=Jitter(0.1, 0.1), network=Network(1e-5, 1e9))
        means.append(_mean(_staleness(runs)))
    assert means[1] - means[0] == pytest.approx(splits, rel=0.12)


# --- updates ----------------------------------------------------------------------------------------------------------
class Sources(strategies.load(NAME)):
    """Notes whose gradients each update was made of."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.sources, self.updates = [], []
        if self.place.children:
            self._receive, self.loop.handler.receive = self.loop.handler.receive, self._note

    def _note(self, request):
        self.sources += [request.source] * (request.weight > 0)
        before = self.replica.clock
        self._receive(request)
        if self.replica.clock > before:
            self.updates.append(self.sources)
            self.sources = []


@pytest.mark.parametrize(("workers", "splits", "quota"), [(4, 1, 4), (7, 3, 2), (7, 7, 1)])
def test_an_update_takes_its_quota_from_whoever_comes(workers, splits, quota):
    def body(comm):
        updates = []

        class Noting(Sources):
            def close(self):
                updates.extend(self.updates)
                super().close()

        problem.train(comm, Noting, {"splits": splits}, batch=1, epochs=1)
        return updates

    updates = run_virtual(body, workers + 1, compute=Straggler(Constant(0.1), 1, 3.0))[0]
    assert {len(sources) for sources in updates} == {quota}
    assert len(updates) == problem.SAMPLES // quota
    if quota > 1:
        assert any(len(set(sources)) < quota for sources in updates), "one worker may give two gradients of one update"
        assert any(1 not in sources for sources in updates), "another none"


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("options", [{}, {"servers": 2}, {"servers": "colocated"}, {"overlap": True}], ids=str)
def test_n_equal_to_the_workers_is_the_asynchronous_server_to_the_bit(optimizer, options):
    size = 6 if options.get("servers") == "colocated" else 4 + options.get("servers", 1)
    workers = size if options.get("servers") == "colocated" else 4
    settings = {"optimizer": optimizer, "samples": 50, "compute": Exponential(0.1), "seed": 2}
    soft = _train({"splits": workers, **options}, size, **settings)
    plain = _train(options, size, name="parameter_server", **settings)
    assert torch.equal(soft[0].consensus[0], plain[0].consensus[0])
    assert _staleness(soft) == _staleness(plain)


@pytest.mark.parametrize("servers", [1, 2, "colocated"])
def test_gradients_without_an_update_wait_for_the_next_epoch(servers):
    """5 workers, c = 2, 13 gradients an epoch: 6 updates and one left, then 7."""
    size = 5 if servers == "colocated" else 5 + servers
    settings = {"batch": 4, "samples": 49, "compute": Jitter(0.1, 0.2)}
    once = _train({"splits": 2, "servers": servers}, size, epochs=1, **settings)
    twice = _train({"splits": 2, "servers": servers}, size, epochs=2, **settings)
    for run in (once[0], twice[0]):
        assert len(run.staleness) == (13 if run is once[0] else 26) - run.pending
    assert (once[0].pending, twice[0].pending) == (1, 0)


@pytest.mark.parametrize("modulation", ["average", "measured", "exponential"])
def test_a_modulated_run_learns(modulation):
    start = problem.loss(problem.model(), range(problem.SAMPLES)).item()
    runs = _train({"splits": 4, "modulation": modulation}, 9, optimizer="sgd", epochs=4, compute=Jitter(0.1, 0.2))
    module = problem.model()
    problem.load(module, runs[0].consensus)
    assert problem.loss(module, range(problem.SAMPLES)).item() < 0.95 * start


# --- trees ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "fan_in", "splits", "group"),
    [(7, 2, 4, 1), (15, 2, 1, 4), (15, 2, 2, 4), (13, 3, 4, 2), (16, 4, 2, 3)],
)
def test_aggregators_sum_as_many_as_make_up_an_update(size, fan_in, splits, group):
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
    assert len(_staleness(runs)) + sum(run.pending for run in runs) == gradients


@pytest.mark.parametrize(("size", "fan_in", "splits", "levels"), [(7, 2, 1, 1), (15, 2, 2, 2)])
def test_a_tree_adds_less_than_n_of_staleness_per_level(size, fan_in, splits, levels):
    settings = {"batch": 1, "epochs": 1, "compute": Jitter(0.1, 0.1)}
    runs = _train({"splits": splits, "fan_in": fan_in}, size, **settings)
    flat = _train({"splits": splits}, sum(run.is_worker for run in runs) + 1, **settings)
    more = _mean(_staleness(runs)) - _mean(_staleness(flat))
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


@pytest.mark.parametrize("options", [{}, {"servers": 2}, {"servers": "colocated"}, {"fan_in": 4}], ids=str)
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
            self.rates.append((policy.factor(0), _mean(policy.measured.state() or [0])))
            self._updated(staleness)

    settings = {"batch": 1, "epochs": 1, "compute": Jitter(0.1, 0.1)}
    size = 8 if options.get("servers") == "colocated" else 9 + options.get("servers", 1)
    _train({"splits": 4, "modulation": "measured", **options}, size, name=Noting, **settings)
    assert len(Noting.rates) > 100
    assert all(rate == 1 / max(1, measured) for rate, measured in Noting.rates)
    assert 1 / 12 < min(rate for rate, _ in Noting.rates) < 1 / 2


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"splits": 4}, 4, "strategy.splits must be at most the number of workers, 3; got 4"),
        ({"splits": 3, "servers": "colocated"}, 2, "strategy.splits must be at most the number of workers, 2; got 3"),
        ({"fan_in": 2, "modulation": "plus-one"}, 7, "fan_in must go with modulation .* got modulation plus-one"),
        ({"fan_in": 2, "max_staleness": 3}, 7, "fan_in must go with .* max_staleness 3. Leave fan_in out"),
        ({"fan_in": 2, "servers": 2}, 7, "fan_in must go with one server"),
        ({"overlap": True, "servers": "colocated"}, 3, "strategy.overlap must be false where .*; got true"),
    ],
)
def test_combinations_that_contradict_each_other_are_refused(options, size, message):
    with pytest.raises(ConfigError, match=message):
        _train(options, size)


def test_on_one_rank_any_number_of_splits_is_the_plain_optimiser():
    (run,) = _train({"splits": 30}, 1)
    assert torch.equal(run.params[0], problem.serial(1)[0])
