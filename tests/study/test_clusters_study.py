"""The toy task of delayed Nesterov momentum: its quick version as users run it, and its claims on made-up numbers."""

from __future__ import annotations

import math

import pytest

from harness import studies
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.merge import load
from hpcdist.records import Evaluation, load_summary, read_evaluations
from hpcdist.tools.simulate.cluster import ClusterConfig
from hpcdist.train import load_job
from kit.output import verdict
from study.pretended import ended

STUDY, SMALLER = "clusters", {"points": 1024, "batches": 80}

pytestmark = pytest.mark.time_limit(studies.TIME_LIMIT_S)


@pytest.fixture
def run(study, training, tmp_path):
    """Make a short run of a rule; its evaluations and summary."""
    load_job(study.JOB).data(data := tmp_path / "clusters-1024.h5")

    def make(rule, seed: int = 0):
        group = study.Scale(hidden=4, batches=160).declare(rule, -1)
        settings = {**load({}, None, group.settings), "seed": seed, "data": {"path": str(data)}, "batch_size": 8}
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        compute = ClusterConfig.from_mapping(load({}, None, group.cluster), "cluster").steps(float)
        run_virtual(training.train(settings, folder), group.ranks, seed=seed, compute=compute)
        return read_evaluations(folder), load_summary(folder)

    return make


# --- the quick version ------------------------------------------------------------------------------------------------
@pytest.mark.extended
def test_tables_and_claims_are_written(study, written):
    table, claims = written()
    assert [row["outer step"] for row in table] == [rule.name for rule in study.RULES] and len(claims) == 4


# --- one run ----------------------------------------------------------------------------------------------------------
def test_the_slowest_worker_sets_the_pace_of_the_synchronous_rule_alone(study, run):
    looks, summary = run(study.SYNCHRONOUS)
    assert looks[-1].step == 160 and summary.samples == 160 * 8
    assert looks[-1].seconds == pytest.approx(160 / 4 * study.STEPS_S[-1], rel=1e-3)
    for rule in (study.DELAYED, study.DYNAMIC):
        looks, summary = run(rule)
        assert 160 <= looks[-1].step < 160 + 4 * study.PERIOD and summary.samples == looks[-1].step * 8
        together_s = 1 / sum(1 / step_s for step_s in study.STEPS_S)
        assert 160 * together_s < looks[-1].seconds < 160 * together_s + study.PERIOD * study.STEPS_S[-1]
        assert summary.staleness.mean > 1
        assert [look.step for look in looks] == sorted({look.step for look in looks})


def test_the_same_seed_gives_the_same_run(study, run):
    assert run(study.DYNAMIC, 1) == run(study.DYNAMIC, 1) != run(study.DYNAMIC, 2)


@pytest.mark.parametrize("best", [-4, -1, 3])
def test_the_rate_is_the_one_that_is_better_than_its_neighbours(study, best):
    tried = []

    class Groups:
        def measure(self, group, seeds):
            assert min(seeds) >= study.FIRST_SEED, "no seed of the runs that are shown"
            rate = load({}, None, group.settings)["strategy"]["outer_lr"]
            tried.append(round(2 * math.log10(rate)))
            return [ended(metrics={"accuracy": 1 - abs(tried[-1] - best) / 10})]

    assert study.choose(Groups(), study.QUICK, study.DELAYED) == best
    assert {best - 1, best, best + 1} <= set(tried) and len(set(tried)) == len(tried)


# --- claims -----------------------------------------------------------------------------------------------------------
def pretended(study, accuracies: dict) -> object:
    """Results that end with these accuracies, in %; the synchronous rule has half of its accuracy in half the time."""
    runs = {}
    for rule in study.RULES:
        ends_s = 200.0 if rule.waits else 100.0
        runs[rule] = []
        for seed in range(5):
            end = (accuracies[rule] + 0.1 * seed) / 100
            looks = ((ends_s / 2, end / 2), (ends_s, end))
            curve = [Evaluation(1, 0, 1, seconds, {"accuracy": accuracy}) for seconds, accuracy in looks]
            runs[rule].append(ended(curve))
    return study.Results(dict.fromkeys(study.RULES, -1), runs)


@pytest.mark.parametrize(
    ("changed", "verdicts"),
    [
        ({}, ["SHOWN", "SHOWN", "SHOWN", "SHOWN"]),
        ({"NESTEROV": 60, "DELAYED": 60}, ["NOT SHOWN", "SHOWN IN PART", "SHOWN", "SHOWN"]),
        ({"DYNAMIC": 20}, ["SHOWN", "SHOWN", "NOT SHOWN", "NOT SHOWN"]),
    ],
)
def test_verdicts_follow_their_rules(study, changed, verdicts):
    accuracies = {rule: 40 for rule in study.RULES} | {study.SYNCHRONOUS: 60, study.DELAYED: 55, study.DYNAMIC: 60}
    accuracies |= {getattr(study, name): value for name, value in changed.items()}
    results = pretended(study, accuracies)
    assert [verdict(claim.parts) for claim in study.claims(results)] == verdicts


def test_each_rule_stands_beside_the_quickest(study):
    accuracies = {rule: 50 for rule in study.RULES}
    rows = list(pretended(study, accuracies).rows())
    assert list(rows[0].values()) == ["synchronous DiLoCo", "0.32", "50.20 ± 0.20", "25.10 ± 0.10", "200", "0.00"]
    assert list(rows[0])[2:] == ["accuracy in %", "when the quickest ends", "s", "mean staleness"]
    assert rows[1]["when the quickest ends"] == rows[1]["accuracy in %"] and rows[1]["s"] == "100"
