"""The study of staleness: its quick grid is run as a user would, and its verdicts are held against results made up."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from harness import studies
from hpcdist.records import load_summary, read_records
from kit.output import paragraphs
from study.pretended import ended

FIGURES = ("error_time", "error_batch", "staleness", "modulation")

STUDY = "staleness"

pytestmark = pytest.mark.time_limit(studies.TIME_LIMIT_S)


def runs(folder: Path) -> list[dict]:
    """The settings and the measurements of all runs."""
    found = []
    for path in (folder / place for place in ("runs", "tuning")):
        for of_run in sorted(path.iterdir()):
            settings = json.loads((of_run / "run.json").read_text())["settings"]
            summary = load_summary(of_run)
            found.append(
                {
                    "splits": settings["strategy"].get("splits", 0),
                    "batch": settings["batch_size"],
                    "learners": summary.workers,
                    "rate": settings["optimizer"]["lr"],
                    "seed": summary.seed,
                    "samples": summary.samples,
                    "error": 1 - summary.metrics["accuracy"],
                    "virtual_s": summary.wall_s,
                    "updates": read_records(of_run)[0][-1].clock,
                    "staleness_histogram": summary.staleness.histogram,
                    "staleness_max": summary.staleness.max,
                }
            )
    return found


@pytest.mark.extended
def test_every_run_is_a_whole_one(quick, study):
    found = runs(quick[0])
    cells = study.QUICK.cells()
    assert len(found) == 2 * (len(cells) + 7), "two seeds of each cell and of seven rates"
    assert {run["samples"] for run in found} == {study.QUICK.passes * 898}, "the same budget for all"
    for run in found:
        assert 0 < run["error"] < 1 and run["virtual_s"] > 0
        gradients = sum(run["staleness_histogram"].values())
        if run["splits"]:
            assert run["updates"] == gradients / (run["learners"] // run["splits"]), "each of c gradients"
        else:
            assert run["updates"] == -(-run["samples"] // (run["batch"] * run["learners"])), "each of all their batches"
            assert run["staleness_max"] == 0
        assert run["staleness_max"] == max(map(int, run["staleness_histogram"]))
    studied = [run for run in found if run["seed"] < 1000]
    (rate,) = {run["rate"] for run in studied if run["splits"]}
    assert rate in {run["rate"] for run in found if run["seed"] >= 1000}, "one that one learner was run at"
    for run in studied:
        if not run["splits"]:
            assert run["rate"] == pytest.approx(rate * (run["batch"] * run["learners"] / 128) ** 0.5)


@pytest.mark.extended
def test_tables_figures_and_claims_are_written(quick):
    folder, printed = quick
    with open(folder / "table.csv", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    with open(folder / "runs.csv", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 2 * len(table)
    assert {"hardsync", "1-softsync", "2-softsync", "async"} == {row["protocol"] for row in table}
    text = (folder / "claims.txt").read_text(encoding="utf-8")
    assert text in printed
    for number, paragraph in enumerate(text.split("\n\n"), 1):
        assert paragraph.startswith(f"{number}. ") and ("SHOWN" in paragraph or "NOT SHOWN" in paragraph)
    for name in FIGURES:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (folder / f"{name}.svg").read_text()


@pytest.mark.extended
def test_finished_runs_are_not_made_again(goes_on_alike):
    goes_on_alike()


# --- verdicts ---------------------------------------------------------------------------------------------------------
def made_up(study, error, seconds, staleness):
    """Results whose runs measured what these functions of the cell say, and a little that differs between seeds."""
    results = study.Results(study.Grid(seeds=3), rate=0.1)
    for cell in results.grid.cells():
        results.runs[cell] = [
            ended(
                metrics={"accuracy": 1 - (error(cell) + 0.001 * seed)},
                wall_s=seconds(cell) + 0.001 * seed,
                staleness={
                    "mean": staleness(cell),
                    "max": round(staleness(cell)),
                    "histogram": {round(staleness(cell)): 10},
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


def test_results_as_the_paper_has_them_show_every_claim(study):
    def error(cell):
        stale = cell.modulation == "none" and cell.splits > 2
        return 0.9 if stale else 0.02 + cell.total_batch / 10_000

    def seconds(cell):
        return 100 / cell.learners * (1.5 if cell.splits == 0 else 1.2 if cell.splits == 1 else 1.0)

    found = verdicts(study, error=error, seconds=seconds, staleness=lambda cell: cell.expected_staleness)
    assert found == ["SHOWN"] * 4


def test_results_that_contradict_the_paper_show_no_claim(study):
    def error(cell):
        stale = cell.modulation == "none" and cell.splits > 1
        return 0.6 - cell.batch / 100 - 0.2 * stale + 0.02 * (cell.modulation == "average")

    found = verdicts(
        study, error=error, seconds=lambda cell: 1.0 + cell.splits, staleness=lambda cell: 2 * cell.expected_staleness
    )
    assert found == ["NOT SHOWN"] * 4


def test_runs_that_diverged_are_counted(study):
    results = made_up(
        study, lambda cell: 0.899 if cell.splits == 16 else 0.05, lambda cell: 1.0, lambda cell: cell.expected_staleness
    )
    first, *_ = paragraphs(study.claims(results))
    assert "90.00 ± 0.25 (3 of 3 diverged) at n = 16" in first.replace("\n", " ")
    assert {row["diverged"] for row in results.rows() if row["n"] == 16} == {"3/3"}


def test_the_grid_has_each_cell_once_and_the_diagonal_that_the_claims_read(study):
    for found in (study.Grid(), study.QUICK):
        cells = found.cells()
        assert len(set(cells)) == len(cells)
        assert found.probe in found.diagonal and len(found.diagonal) > 1
        assert study.hardsync(*found.probe) in cells
        assert found.splits[-1] == found.probe[1]
