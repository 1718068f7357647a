"""The table of a report, of runs made by hand; tests/test_cli.py has the command."""

from __future__ import annotations

import math

from hpcdist.tools.report import table
from hpcdist.tools.report.analysis import analyse
from hpcdist.tools.report.results import read_jobs
from study import evidence


def texts(folder, runs, *columns, sort=None, **said) -> list[list[str]]:
    """What the table shows of a comparison's runs, row by row."""
    evidence.write_comparison(folder, runs, **said)
    jobs = [analyse(job) for job in read_jobs([folder])]
    (found,) = table.tables(jobs, columns or None, sort)
    return [[text for _, text in row.values()] for row in found.rows]


def test_times_to_the_target_have_no_mean_where_a_run_did_not_reach_it(tmp_path):
    runs = [{"name": "allreduce", "seed": 0}, {"name": "allreduce", "seed": 1}]
    runs += [{**run, "name": "late", "accuracy": (0.5, 0.6 + 0.38 * run["seed"])} for run in runs]
    runs += [{**run, "name": "never", "accuracy": (0.5, 0.6)} for run in runs[:2]]
    runs += [{"name": "lost", "seed": seed, "made": False} for seed in (0, 1)]
    assert texts(tmp_path, runs, "name", "runs", "time_to_target_s", "reached", sort="time_to_target_s") == [
        ["allreduce", "2", "9", "2"],
        ["late", "2", "12 at best (1 of 2)", "1"],
        ["lost", "0 of 2", "–", "0"],
        ["never", "2", "not reached", "0"],
    ]


def test_what_was_spent_until_the_target_has_no_mean_where_a_run_did_not_reach_it(tmp_path):
    runs = [{"name": "all", "seed": seed, "joules": 8.0} for seed in (0, 1)]
    runs += [{**run, "name": "one", "accuracy": (0.5, 0.6 + 0.38 * run["seed"])} for run in runs]
    assert texts(tmp_path, runs, "name", "samples_to_target", "joules_to_target") == [
        ["all", "180", "6"], ["one", "–", "–"],
    ]  # fmt: skip


def test_what_is_not_finite_is_said_beside_the_mean_of_the_others(tmp_path):
    runs = [
        {"name": "some", "seed": seed, "accuracy": (0.5, end)} for seed, end in enumerate((0.5, math.nan, 0.5, 0.5))
    ]
    runs += [{"name": "none", "accuracy": (0.5, math.inf)}]
    assert texts(tmp_path, runs, "name", "accuracy", sort="accuracy") == [
        ["some", "0.5000 ± 0.0000 (3 of 4 finite)"], ["none", "not finite"],
    ]  # fmt: skip


def test_speed_ups_are_over_one_rank_with_its_own_batch_and_the_best_come_first(tmp_path):
    runs = [{"name": "allreduce", "ranks": ranks, "seconds": 12.0 / ranks} for ranks in (1, 2, 4)]
    runs += [{"name": "serial, batch 40", "kind": "serial", "ranks": 1, "batch": 40, "seconds": 24.0}]
    runs += [{"name": "ddp", "kind": "baseline", "ranks": 2, "seconds": 3.0, "accuracy": (0.5, 0.6)}]
    assert texts(tmp_path / "a", runs, "name", "ranks", "speedup", sort="speedup") == [
        ["allreduce", "4", "4"], ["allreduce", "2", "2"], ["allreduce", "1", "1"], ["serial, batch 40", "1", "0.5"],
        ["ddp [baseline]", "2", "–"],
    ]  # fmt: skip
    found = texts(tmp_path / "b", runs, "ranks", "speedup", sort="name", target=None)
    assert found[:3] == [["1", "1"], ["2", "4"], ["4", "16"]], "of samples per second, without a target"


def test_virtual_ranks_are_named_once(tmp_path, capsys):
    both = [{"name": "a", "virtual": {"network": {}}}, {"name": "b"}]
    assert [row[0] for row in texts(tmp_path / "a", both)] == ["a, virtual", "b"]
    assert [row[0] for row in texts(tmp_path / "b", both[:1])] == ["a"]
    table.show(table.tables([analyse(job) for job in read_jobs([tmp_path / "b"])]))
    assert capsys.readouterr().out.startswith("digits: 1 run, on virtual ranks; one run per group\n")


def test_columns_that_say_nothing_are_shown_only_where_they_are_asked_for(tmp_path, capsys):
    evidence.write_run(tmp_path / "a")
    jobs = [analyse(job) for job in read_jobs([tmp_path])]
    shown, every = table.tables(jobs), table.tables(jobs, every=True)
    assert list(shown[0].rows[0]) == [
        "name", "ranks", "metric.accuracy", "samples_per_s", "wall_s", "bytes_per_step", "waiting_s",
    ]  # fmt: skip
    assert {"runs", "stages", "staleness_mean", "skipped", "joules", "version.hpcdist", "seed"} <= set(every[0].rows[0])
