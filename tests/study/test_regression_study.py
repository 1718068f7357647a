"""The study of accuracy: its quick version is run as a user would, and its answers are held against numbers made up."""

from __future__ import annotations

import json
import tempfile
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest
import torch

from harness import studies
from hpcdist.comm.virtual import Jitter, run_virtual
from hpcdist.config.merge import load
from hpcdist.records import read_evaluations
from hpcdist.train import load_job

STUDY = "regression"

pytestmark = pytest.mark.time_limit(studies.TIME_LIMIT_S)


@pytest.mark.extended
def test_the_quick_version(quick, study):
    folder, printed = quick
    found = json.loads((folder / "results.json").read_text())
    runs = found["runs"]
    assert len(runs) == len(studies.made(folder)) == 2 * (8 + len(study.JOB_SETUPS))
    for settings, summary, curve in ((run["settings"], run["summary"], run["curve"]) for run in runs):
        if "epochs" in settings:
            assert 0 < summary["metrics"]["rmse"] < 4.9, "the deviation of the targets: better than their mean"
            continue
        rmse = {look["step"]: look["metrics"]["rmse"] for look in curve}
        assert list(rmse) == list(range(settings["every"], settings["updates"] + 1, settings["every"]))
        assert 0 < rmse[settings["updates"]] < 4.9
        asynchronous = summary["workers"] == 2
        assert summary["staleness"]["mean"] == pytest.approx(1 if asynchronous else 0, abs=0.03), "λ − 1"
        assert (summary["staleness"]["max"] > 1) == asynchronous, "step times vary"
    of_job = [run for run in runs if "epochs" in run["settings"]]
    four = [run["summary"]["metrics"]["rmse"] for run in of_job if run["summary"]["ranks"] == 4][:2]
    one = [run["summary"]["metrics"]["rmse"] for run in of_job if run["settings"]["batch_size"] == 40]
    assert four == pytest.approx(one, rel=1e-4), "all-reduce is one process with the whole batch"

    table, of_job = found["tables"].values()
    assert [row[""] for row in table] == [protocol.name for protocol in study.PROTOCOLS]
    assert [row[""] for row in of_job] == [setup.name for setup in study.JOB_SETUPS]
    assert set(table[0]) == {"", "100 updates", "20,000 samples", "100 steps per worker"}
    case_3 = {"own": 500, "batch_size": 100}
    of_case_3 = [run["curve"] for run in runs if case_3.items() <= run["settings"].items()]
    ends = [look["metrics"]["rmse"] for curve in of_case_3 for look in curve if look["step"] == 200]
    assert len(ends) == 2 and table[3]["20,000 samples"].startswith(f"{fmean(ends):.3f} ("), "two seeds: no interval"
    text = (folder / "answer.md").read_text()
    assert all(f"| {row['']} | " in text for row in (*table, *of_job))
    assert found["answer"] in printed and found["answer"] in text
    for words in ("With 100 updates: case 1", "With 20,000 samples: case 1", "With 100 steps per worker: case 1"):
        assert words in found["answer"].replace("\n", " ")


# --- what is compared -------------------------------------------------------------------------------------------------
def test_budgets_hold_what_they_say(study):
    updates, samples, steps = study.Results(steps=10_000, seeds=5).budgets
    assert {updates.updates(p) for p in updates.protocols()} == {10_000}
    assert {samples.updates(p) * p.batch for p in samples.protocols()} == {2_000_000}
    assert {steps.updates(p) // p.workers for p in study.CASES} == {10_000}
    for budget in (updates, samples, steps):
        found = [(p.training, budget.updates(p)) for p in budget.protocols()]
        assert len(set(found)) == len(found), "nothing is compared twice"
        assert set(study.CASES) <= set(budget.protocols())


def test_every_comparison_has_its_run(study):
    results = study.Results(steps=10_000, seeds=5)
    groups = results.groups()
    for budget in results.budgets:
        for protocol in budget.protocols():
            settings = load({}, None, groups[protocol.training].settings)
            assert budget.updates(protocol) <= settings["updates"]
            assert budget.updates(protocol) % settings["every"] == 0


def test_workers_have_the_samples_of_their_case(training):
    halves = [training.rows_of(worker, 2, 500, 1000).tolist() for worker in range(2)]
    assert sorted(halves[0] + halves[1]) == list(range(1000))
    assert [len(training.rows_of(worker, 2, 1000, 1000)) for worker in range(2)] == [1000, 1000]


def test_batches_run_through_all_samples_again_and_again(training):
    rows = torch.arange(500, 1000)
    drawn = list(islice(training.batches(rows, 200, seed=0, worker=1), 5))
    assert {len(batch) for batch in drawn} == {200}
    both = torch.cat(drawn)
    for passed in (both[:500], both[500:]):
        assert sorted(passed.tolist()) == rows.tolist()
    assert both[:500].tolist() != both[500:].tolist()
    other = next(training.batches(rows, 200, seed=0, worker=0))
    assert other.tolist() != drawn[0].tolist()


def test_a_short_run_is_the_beginning_of_a_long_one_and_an_average_is_of_the_second_half(study, training, tmp_path):
    load_job(study.JOB).data(data := tmp_path / "friedman1.h5")

    def run(protocol, updates: int, **changes) -> dict:
        group = study.Results(steps=20, seeds=1).groups()[protocol.training]
        settings = {**load({}, None, group.settings), "seed": 0, "data": {"path": str(data)}, "updates": updates}
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        run_virtual(training.train({**settings, **changes}, folder), group.ranks, compute=Jitter(4e-3, 0.2))
        return {look.step: look.metrics["rmse"] for look in read_evaluations(folder)}

    for protocol in (study.SERIAL, study.CASES[2]):
        assert run(protocol, 20)[10] == run(protocol, 10)[10]
    average = next(control for control in study.CONTROLS if control.averaged)
    assert run(average, 2, every=2)[2] == run(study.SERIAL, 2)[2], "of the last iterate alone"
    assert run(average, 4, every=4)[4] != run(study.SERIAL, 4)[4]


# --- answers ----------------------------------------------------------------------------------------------------------
SERIAL = [1.00, 1.01, 0.99, 1.02, 0.98]
NO_CONTROL = "less accurate, matched by no control (the nearest, b: +0.100 ± 0.001, leaves +0.200 ± 0.003)"


def shifted(by: float, noise: float) -> list[float]:
    return [value + by + noise * (-1) ** seed for seed, value in enumerate(SERIAL)]


@pytest.mark.parametrize(
    ("case", "controls", "expected"),
    [
        (0.0, {"a": -0.2}, "cannot be told from 0"),
        (-0.2, {"a": -0.2, "b": -0.1}, "more accurate, matched by a (-0.200 ± 0.001)"),
        (0.3, {"a": 0.3, "b": 0.3}, "less accurate, matched by a (+0.300 ± 0.001) and by b (+0.300 ± 0.001)"),
        (0.3, {"a": -0.3, "b": 0.1}, NO_CONTROL),
    ],
)
def test_a_control_matches_what_it_shows_too(study, case, controls, expected):
    made_up = {name: shifted(by, -0.001) for name, by in controls.items()}
    assert study.explanation(shifted(case, 0.001), SERIAL, made_up) == expected
