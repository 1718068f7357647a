"""The study of staleness: its quick grid is run as a user would, and its verdicts are held against results made up."""

from __future__ import annotations

import csv
import json

import pytest

from harness import studies
from hpcdist.records import load_summary
from kit.output import paragraphs
from study.pretended import ended

STUDY, SMALLER = "staleness", {"passes": 1}

pytestmark = pytest.mark.time_limit(studies.TIME_LIMIT_S)


@pytest.mark.extended
def test_the_quick_version(quick, study, written):
    found = [
        (json.loads((path / "run.json").read_text())["settings"], load_summary(path))
        for place in ("runs", "tuning")
        for path in sorted((quick[0] / place).iterdir())
    ]
    groups = study.QUICK.groups()
    assert len(found) == 2 * (len(groups) + 7), "two seeds of each group and of seven rates"
    assert {summary.samples for _, summary in found} == {study.QUICK.passes * 898}, "the same budget for all"
    shown, tried = set(), set()  # rates
    for settings, summary in found:
        if summary.seed >= study.FIRST_SEED:
            tried.add(settings["optimizer"]["lr"])
        elif settings["strategy"].get("splits", 0):
            shown.add(settings["optimizer"]["lr"])
        else:
            assert summary.staleness.max == 0
    (rate,) = shown
    assert rate in tried, "one that one learner was run at"
    for settings, summary in found:
        if summary.seed < study.FIRST_SEED and not settings["strategy"].get("splits", 0):
            global_batch = settings["batch_size"] * summary.workers
            assert settings["optimizer"]["lr"] == pytest.approx(rate * (global_batch / 128) ** 0.5)
    table, claims = written("error_time", "error_batch", "staleness", "modulation")
    with open(quick[0] / "runs.csv", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 2 * len(table)
    assert {"hardsync", "1-softsync", "2-softsync", "async"} == {row["protocol"] for row in table}
    assert all("SHOWN" in claim for claim in claims)


# --- verdicts ---------------------------------------------------------------------------------------------------------
def made_up(study, error, seconds, staleness):
    """Results whose runs measured what these functions of the group say, and a little that differs between seeds."""
    results = study.Results(study.Grid(seeds=3), rate=0.1)
    for group in results.grid.groups():
        results.runs[group] = [
            ended(
                metrics={"accuracy": 1 - (error(group) + 0.001 * seed)},
                wall_s=seconds(group) + 0.001 * seed,
                staleness={
                    "mean": staleness(group),
                    "max": round(staleness(group)),
                    "histogram": {round(staleness(group)): 10},
                },
            )
            for seed in range(3)
        ]
    return results


def verdicts(study, **measured) -> list[str]:
    found = []
    for paragraph in paragraphs(study.claims(made_up(study, **measured))):
        line = paragraph.replace("\n", " ")
        found.append(next(v for v in ("SHOWN IN PART", "NOT SHOWN", "SHOWN") if f" {v}. " in line))
    return found


def test_verdicts_follow_the_results(study):
    """As the paper has them, and the opposite."""

    def error(group):
        stale = group.modulation == "none" and group.splits > 2
        return 0.9 if stale else 0.02 + group.total_batch / 10_000

    def seconds(group):
        return 100 / group.learners * (1.5 if group.splits == 0 else 1.2 if group.splits == 1 else 1.0)

    def wrong(group):
        stale = group.modulation == "none" and group.splits > 1
        return 0.6 - group.batch / 100 - 0.2 * stale + 0.02 * (group.modulation == "average")

    found = verdicts(study, error=error, seconds=seconds, staleness=lambda group: group.expected_staleness)
    assert found == ["SHOWN"] * 4
    late, stale = lambda group: 1.0 + group.splits, lambda group: 2 * group.expected_staleness
    assert verdicts(study, error=wrong, seconds=late, staleness=stale) == ["NOT SHOWN"] * 4


def test_runs_that_diverged_are_counted(study):
    results = made_up(
        study,
        lambda group: 0.899 if group.splits == 16 else 0.05,
        lambda group: 1.0,
        lambda group: group.expected_staleness,
    )
    first, *_ = paragraphs(study.claims(results))
    assert "90.00 ± 0.25 (3 of 3 diverged) at n = 16" in first.replace("\n", " ")
    assert {row["diverged"] for row in results.rows() if row["n"] == 16} == {"3/3"}


def test_the_grid_has_each_cell_once_and_the_diagonal_that_the_claims_read(study):
    for found in (study.Grid(), study.QUICK):
        groups = found.groups()
        assert len(set(groups)) == len(groups)
        assert found.probe in found.diagonal and len(found.diagonal) > 1
        assert study.hardsync(*found.probe) in groups
        assert found.splits[-1] == found.probe[1]
