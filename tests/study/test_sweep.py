"""A sweep: its points, what is refused, and halving, with runs that pretend."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.config import load
from hpcdist.errors import ConfigError
from hpcdist.tools.compare import folder
from hpcdist.tools.compare.plan import Declaration, SweepDeclaration
from hpcdist.tools.compare.sweep import Sweep, points, read_axis
from hpcdist.tools.runs import COMPARISON
from study.pretended import PretendedRuns, runner

DECLARED = SweepDeclaration(
    job=str(Path(__file__).parents[2] / "jobs" / "digits.py"),
    job_sha256="0",
    strategy="softsync:splits=1",
    over=("optimizer.lr=0.001..0.128:log:8", "batch_size=16"),
    points=0,
    ranks=2,
    metric="accuracy",
)


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("batch_size=16, 32", ("16", "32")),
        ("optimizer.lr=0.01..1:log:3", ("0.01", "0.1", "1")),
        ("optimizer.lr=1e-4..1e-2:log:3", ("0.0001", "0.001", "0.01")),
        ("strategy.period=1..4:4", ("1", "2", "3", "4")),
        ("model.width=1..3:9", ("1", "2", "3")),
        ("optimizer.momentum=0..0.5:2", ("0", "0.5")),
    ],
)
def test_a_grid_has_the_values_listed_or_so_many_of_a_range(text, grid):
    assert read_axis(text).grid() == grid


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size", "--over must be KEY=A,B,C or KEY=LOW..HIGH"),
        ("lr=1..0.1", "--over lr must be LOW..HIGH with two numbers, of which the first is the smaller one"),
        ("lr=0..1:log", "above 0 with :log"),
        ("lr=a..b", "two numbers"),
        ("lr=0.1..1", "--over lr must list values, or say how many of a range, for a grid"),
    ],
)
def test_wrong_values_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read_axis(text).grid()


def test_random_points_lie_in_their_ranges_are_different_and_always_the_same():
    declared = replace(DECLARED, points=20, over=("optimizer.lr=0.01..1:log", "batch_size=8..12"))
    found = points(declared)
    assert found == points(declared) and len(found) == 20 == len(set(found))
    drawn = [load({}, None, settings) for settings in found]
    assert {point["batch_size"] for point in drawn} <= set(range(8, 13))
    assert 4 < sum(point["optimizer"]["lr"] < 0.1 for point in drawn) < 16
    assert len(points(replace(declared, over=("batch_size=8,16",)))) == 2, "there are no more"


def test_a_sweep_makes_each_run_once_and_shows_the_best_first(tmp_path):
    declared, first = replace(DECLARED, seeds=2), PretendedRuns()
    sweep = Sweep(declared, tmp_path)
    assert sweep.make(runner(tmp_path, first)) == [] and len(first.made) == 16
    table = sweep.table()
    assert table[0] == {"optimizer.lr": "0.008", "batch_size": "16", "samples": 200, "accuracy": pytest.approx(0.905)}
    again = PretendedRuns()
    assert Sweep(declared, tmp_path).make(runner(tmp_path, again)) == [] and again.made == []
    found = json.loads((tmp_path / COMPARISON).read_text())
    assert len(found["runs"]) == 16 and found["runs"][0]["name"].startswith("optimizer.lr=")
    with pytest.raises(ConfigError, match="seeds: 2 against 1 now"):
        Sweep(DECLARED, tmp_path)
    with pytest.raises(ConfigError, match="JOB must be given where there is no comparison to go on with"):
        folder.declared_in(tmp_path, Declaration)
    assert folder.declared_in(tmp_path, SweepDeclaration) == declared


def test_a_point_that_fails_is_last(tmp_path):
    failing = "optimizer.lr=0.008, batch_size=16"
    sweep = Sweep(DECLARED, tmp_path)
    (failed,) = sweep.make(runner(tmp_path, PretendedRuns(failing)))
    assert failed.name == failing and sweep.table()[-1]["accuracy"] is None


def test_halving_gives_the_whole_budget_to_the_best(tmp_path):
    over = ("optimizer.lr=0.001..0.256:log:9", "batch_size=16")
    declared, first = replace(DECLARED, over=over, halving=True, budget={"samples": 16 * 90}), PretendedRuns()
    sweep = Sweep(declared, tmp_path)
    assert sweep.rungs() == [9, 3, 1]
    steps = {part: load({}, None, sweep.plan(sweep.cells[:1], part)[0].overrides) for part in sweep.rungs()}
    assert [steps[part]["budget"] for part in sweep.rungs()] == [{"steps": 10}, {"steps": 30}, {"steps": 90}]
    assert {found["checkpoint"]["every_steps"] for found in steps.values()} == {10}, "each rung ends with one"
    sweep.make(runner(tmp_path, first))
    assert len(first.made) == 13 and len(set(first.made)) == 9
    table = sweep.table()
    assert table[0]["optimizer.lr"] == "0.008" and [row["samples"] for row in table] == [9000, 3000, 3000, *[1000] * 6]
    assert len(json.loads((tmp_path / COMPARISON).read_text())["runs"]) == 1, "the others have another budget"
    again = PretendedRuns()
    assert Sweep(declared, tmp_path).make(runner(tmp_path, again)) == [] and again.made == []


def test_halving_needs_a_budget_and_points_are_checked_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="--halving must have a --budget of samples or steps; got none"):
        Sweep(replace(DECLARED, halving=True), tmp_path)
    with pytest.raises(ConfigError, match="batch_size must be an integer"):
        Sweep(replace(DECLARED, over=("batch_size=16,many",)), tmp_path)
