"""A sweep: its space, what is refused, and its trials, with runs that pretend and with virtual ranks."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.merge import load
from hpcdist.errors import ConfigError, DataError, RunError
from hpcdist.records import load_summary, read_evaluations
from hpcdist.tools.compare import folder, trials
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.launchers import MpiLauncher, share_cores
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.compare.run_all import Runner
from hpcdist.tools.compare.space import grid, read_axis
from hpcdist.tools.compare.sweep import SweptRuns
from hpcdist.tools.compare.trials import CUT, Trials
from hpcdist.tools.mpirun import AS_ROOT, ranks_environment
from hpcdist.tools.report import write
from hpcdist.tools.report.sweep import judge_sweep, read_sweep
from hpcdist.tools.runs import COMPARISON, FAILURE, SWEEP
from study.pretended import PretendedRuns

DECLARED = Sweep(
    job=str(Path(__file__).parents[2] / "jobs" / "digits.py"),
    job_sha256="0",
    strategy="softsync:splits=1",
    over=("optimizer.lr=0.001..0.128:log:8", "batch_size=16"),
    trials=8,
    ranks=2,
    sampler="grid",
    metric="accuracy",
)


# --- the space --------------------------------------------------------------------------------------------------------
def test_an_axis_has_the_values_listed_or_so_many_of_a_range():
    for text, values in {
        "batch_size=16, 32": ("16", "32"),
        "optimizer.lr=0.01..1:log:3": ("0.01", "0.1", "1"),
        "optimizer.lr=1e-4..1e-2:log:3": ("0.0001", "0.001", "0.01"),
        "strategy.period=1..4:4": ("1", "2", "3", "4"),
        "model.width=1..3:9": ("1", "2", "3"),
        "optimizer.momentum=-.5..0.5:2": ("-0.5", "0.5"),
    }.items():
        assert read_axis(text).values == values
    for text, message in {
        "batch_size": "--over must be KEY=A,B,C or KEY=LOW..HIGH",
        "=1,2": "--over must be KEY=A,B,C or KEY=LOW..HIGH",
        "batch_size=1,,2": "--over must be KEY=A,B,C or KEY=LOW..HIGH",
        "lr=1..0.1": "--over lr must be LOW..HIGH with LOW < HIGH",
        "lr=0..1:log": "above 0 with :log",
        "lr=a..b": "LOW < HIGH",
        "lr=0.1..1:1": "2 POINTS or more",
        "lr=0.1..1": "--over lr must be a list, or a range with a number of points, for --sampler grid; got a range",
    }.items():
        with pytest.raises(ConfigError, match=message):
            grid([read_axis(text)])


# --- trials -----------------------------------------------------------------------------------------------------------
def test_a_grid_makes_each_run_once_and_shows_the_best_first(tmp_path):
    declared, first = replace(DECLARED, seeds=2), PretendedRuns()
    sweep = SweptRuns(declared, tmp_path)
    assert sweep.run(Runner(tmp_path, first)) == [] and len(first.made) == 16
    best = {"trial": 3, "optimizer.lr": "0.008", "batch_size": "16", "samples": 200, "accuracy": pytest.approx(0.905)}
    assert sweep.rows()[0] == {**best, "state": "complete"}
    again = PretendedRuns()
    assert SweptRuns(declared, tmp_path).run(Runner(tmp_path, again)) == [] and again.made == []
    found = json.loads((tmp_path / COMPARISON).read_text())
    assert len(found["runs"]) == 16 and found["runs"][0]["name"] == "optimizer.lr=0.001, batch_size=16"
    with pytest.raises(ConfigError, match="seeds: 2 against 1 now"):
        SweptRuns(DECLARED, tmp_path)
    with pytest.raises(ConfigError, match="JOB must be given where there is no comparison to resume"):
        folder.read_experiment(tmp_path, Comparison)
    assert folder.read_experiment(tmp_path, Sweep) == declared


def test_the_folder_tells_the_space_and_each_trial(tmp_path):
    declared = replace(DECLARED, over=("optimizer.lr=0.001..0.1:log", "batch_size=8,16"), sampler="random", trials=3)
    SweptRuns(declared, tmp_path).write()
    failing = ", ".join(Trials(tmp_path, declared).start(0))
    SweptRuns(declared, tmp_path).run(Runner(tmp_path, PretendedRuns(failing)))
    found = json.loads((tmp_path / SWEEP).read_text())
    assert (found["sampler"], found["pruner"], found["metric"], found["ranks"]) == ("random", "none", "accuracy", 2)
    lr, batch = found["space"]
    assert (lr["key"], lr["low"], lr["high"], lr["log"]) == ("optimizer.lr", 0.001, 0.1, True)
    assert batch["values"] == ["8", "16"]
    failed, second, _ = found["trials"]
    assert (failed["state"], failed["value"], failed["samples"]) == ("failed", None, None)
    assert second["state"] == "complete" and second["folders"] == ["runs/trial-001-r2-s0"] and second["samples"] == 200
    assert second["value"] == pytest.approx(
        0.9 - abs(math.log2(float(second["settings"]["optimizer.lr"]) / 0.008)) / 10
    )
    assert SweptRuns(declared, tmp_path).rows()[-1]["state"] == "failed"
    again = PretendedRuns()
    assert SweptRuns(declared, tmp_path).run(Runner(tmp_path, again)) == []
    assert again.made == ["runs/trial-000-r2-s0"] and not (tmp_path / again.made[0] / FAILURE).exists()


def test_what_a_killed_process_has_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = Path("relative")
    SweptRuns(DECLARED, output).write()
    journal = output / trials.JOURNAL
    whole = journal.read_bytes()
    (output / trials.LOCK).symlink_to(journal)  # as Optuna made it where the path was relative: it leads nowhere
    journal.write_bytes(whole + whole.splitlines()[-1][:20])
    assert len(Trials(output, DECLARED).all()) == 8 and journal.read_bytes() == whole
    Trials(output, DECLARED).start(0)
    assert all(json.loads(line)["worker_id"] for line in journal.read_text().splitlines())
    assert not os.path.lexists(output / trials.LOCK)


def test_damaged_files_of_a_sweep_are_refused_by_name(tmp_path):
    SweptRuns(DECLARED, tmp_path).run(Runner(tmp_path, PretendedRuns()))
    journal, first = tmp_path / trials.JOURNAL, tmp_path / COMPARISON
    whole = journal.read_text()
    for text in (
        "{\n" + whole,
        whole.replace('"trial_id":0', '"trial_id":"0"', 1),
        whole.replace("sweep", "swept"),
        "",
    ):
        journal.write_text(text)
        with pytest.raises(DataError, match="optuna.log must be a journal of `hpcdist sweep`; got "):
            Trials(tmp_path, DECLARED).all()
    journal.unlink()
    os.mkfifo(journal)
    with pytest.raises(DataError, match="optuna.log must be a journal .* it is a named pipe, not a regular file"):
        Trials(tmp_path, DECLARED).all()
    content = json.loads((tmp_path / SWEEP).read_text())
    content["trials"][0]["settings"]["optimizer.lr"] = "3"
    (tmp_path / SWEEP).write_text(json.dumps(content))
    with pytest.raises(
        DataError, match="sweep.json must be .*; got it: .*trial 0 must have a value of each axis, and folders"
    ):
        read_sweep(tmp_path)
    first.write_text(first.read_text().replace('"trials": 8', '"trials": "many"'))
    with pytest.raises(
        DataError, match="comparison.json must hold an experiment; got trials: .*, got 'many'. Give JOB"
    ):
        folder.read_experiment(tmp_path, Sweep)


def test_random_settings_lie_in_their_ranges_and_are_always_the_same(tmp_path):
    over = ("optimizer.lr=0.01..1:log", "batch_size=8..12")
    drawn = []
    for name in ("one", "other"):
        sweep = SweptRuns(replace(DECLARED, trials=20, over=over, sampler="random"), tmp_path / name)
        sweep.write()
        own = Trials(tmp_path / name, sweep.experiment)
        drawn.append([own.start(number) for number in (range(20) if name == "one" else reversed(range(20)))])
    assert drawn[0] == drawn[1][::-1] and len(set(drawn[0])) == 20
    found = [load({}, None, settings) for settings in drawn[0]]
    assert {point["batch_size"] for point in found} <= set(range(8, 13))
    assert 4 < sum(point["optimizer"]["lr"] < 0.1 for point in found) < 16


def test_tpe_learns_from_the_runs_before_also_after_an_interruption(tmp_path):
    class Interrupted(PretendedRuns):
        def run(self, run, folder):
            if len(self.made) == 15:
                (folder / "checkpoints").mkdir()
                raise KeyboardInterrupt
            super().run(run, folder)

    declared = replace(DECLARED, over=("optimizer.lr=0.0001..1:log",), sampler="tpe", trials=30)
    first, rest = Interrupted(), PretendedRuns()
    with pytest.raises(KeyboardInterrupt):
        SweptRuns(declared, tmp_path).run(Runner(tmp_path, first))
    sweep = SweptRuns(declared, tmp_path)
    assert sweep.run(Runner(tmp_path, rest)) == [] and len(rest.made) == 15
    assert rest.made[0] == "runs/trial-015-r2-s0" and (tmp_path / rest.made[0] / "checkpoints").exists(), "it goes on"
    rates = [float(row["optimizer.lr"]) for row in sorted(sweep.rows(), key=lambda row: row["trial"])]

    def near(rates: list[float]) -> int:
        return sum(abs(math.log2(rate / 0.008)) < 2 for rate in rates)

    assert near(rates[20:]) >= 5 > near(rates[:10])


def test_processes_draw_a_trials_settings_once(tmp_path):
    declared = replace(DECLARED, over=("optimizer.lr=0.01..1:log",), sampler="tpe", seeds=4)
    SweptRuns(declared, tmp_path).write()
    found = []
    threads = [threading.Thread(target=lambda: found.append(Trials(tmp_path, declared).start(2))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1


def test_a_run_without_a_number_as_its_result_has_failed_and_is_not_made_again(tmp_path):
    class Diverging(PretendedRuns):
        def run(self, run, folder):
            super().run(run, folder)
            path = folder / "summary.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "metrics": {"accuracy": math.nan}}))

    sweep = SweptRuns(replace(DECLARED, over=("batch_size=16",)), tmp_path)
    sweep.run(Runner(tmp_path, Diverging()))
    assert json.loads((tmp_path / SWEEP).read_text())["trials"][0]["state"] == "failed"
    again = PretendedRuns()
    assert SweptRuns(sweep.experiment, tmp_path).run(Runner(tmp_path, again)) == [] and again.made == []


# --- the page ---------------------------------------------------------------------------------------------------------
def test_the_page_says_which_settings_are_best_and_which_matter(tmp_path):
    declared = replace(DECLARED, over=("optimizer.lr=0.001..0.128:log:8", "batch_size=16,32"), seeds=1)
    trials = SweptRuns(declared, tmp_path)
    trials.run(Runner(tmp_path, PretendedRuns("optimizer.lr=0.004, batch_size=32")))
    page = write(tmp_path).read_text()
    assert (
        "<h1>Which settings? digits.py</h1>" in page
        and "fastest" not in page
        and "Compared with the reference" not in page
    )
    assert "The best settings: <code>optimizer.lr</code> 0.008, <code>batch_size</code> 16, with accuracy 90 %." in page
    assert "of the differences between 15 complete trials (rough: fewer than 20)." in page
    assert "Accuracy over optimizer.lr. The best trial has" in page
    assert "15 of 16 trials had the whole budget; 1 failed." in page and "each ran with one seed" in page
    found = json.loads((tmp_path / "report" / "runs.json").read_text())["jobs"][0]["sweep"]
    assert found["importance"]["optimizer.lr"] > 0.9 and sum(found["importance"].values()) == pytest.approx(1)
    made = {path.name for path in (tmp_path / "report" / "figures").iterdir()}
    assert made == {
        f"{name}.{kind}" for name in ("setting-1", "setting-2", "parallel") for kind in ("svg", "pdf", "png")
    }


@each("case", [("0.0011", "lower"), ("0.01", None), ("0.098", "upper")])
def test_a_best_value_at_the_end_of_its_range_is_named(case, tmp_path):
    best, end = case
    axis = {"key": "optimizer.lr", "values": [], "low": 0.001, "high": 0.1, "log": True, "whole": False}
    trial = {"number": 0, "state": "complete", "settings": {"optimizer.lr": best}, "value": 0.9, "samples": 10}
    content = {
        "job": "job.py", "strategy": "allreduce", "ranks": 1, "seeds": 1, "sampler": "tpe", "pruner": "asha",
        "metric": "accuracy", "higher_is_better": True, "space": [axis], "trials": [{**trial, "folders": ["runs/a"]}],
    }  # fmt: skip
    (tmp_path / SWEEP).write_text(json.dumps(content))
    said = "".join(judge_sweep(read_sweep(tmp_path)).caveats)
    assert (f"lies at the {end} end of its range" in said) == (end is not None)
    for broken in ({**content, "trials": 3}, {}):
        (tmp_path / SWEEP).write_text(json.dumps(broken))
        with pytest.raises(DataError, match="sweep.json must be written by `hpcdist sweep`"):
            read_sweep(tmp_path)


# --- pruning, on virtual ranks ----------------------------------------------------------------------------------------
class VirtualRuns:
    """Makes the runs of a sweep on virtual ranks, in this process."""

    def run(self, run: PlannedRun, folder: Path) -> None:
        run_virtual(lambda comm: trials.train(comm, folder), run.ranks)


@pytest.mark.parametrize(("pruner", "strategy"), [("asha", "allreduce"), ("median", "softsync:splits=1")])
def test_a_pruner_cuts_runs_of_poor_settings_on_all_ranks_at_the_same_step(pruner, strategy, tmp_path):
    declared = replace(
        DECLARED, over=("optimizer.lr=0.01,0.02,0.005,0.03,0.015,1e-7",), budget={"samples": 800}, evaluations=5,
        pruner=pruner, strategy=strategy, settings=(f"data.path={json.dumps(str(tmp_path / 'digits.h5'))}",),
    )  # fmt: skip
    sweep = SweptRuns(declared, tmp_path)
    assert sweep.run(Runner(tmp_path, VirtualRuns())) == [], "a run that was cut is no failure"
    table = {float(row["optimizer.lr"]): row for row in sweep.rows()}
    row = table[1e-7]
    run = tmp_path / "runs" / f"trial-{row['trial']:03}-r2-s0"
    assert row["state"] == "cut" and row["samples"] < 800 and load_summary(run).stopped_early.endswith(CUT)
    (evaluation,) = read_evaluations(run)
    assert row["accuracy"] == evaluation.metrics["accuracy"]
    assert table[max(rate for rate, row in table.items() if row["state"] == "complete")]["samples"] >= 800
    states = [row["state"] for row in sweep.rows()]
    assert states == sorted(states, key=("complete", "cut").index)


def test_a_run_that_was_interrupted_is_judged_again(tmp_path):
    declared = replace(
        DECLARED, over=("optimizer.lr=0.01,1e-7",), budget={"samples": 960}, evaluations=3, pruner="asha",
        settings=(f"data.path={json.dumps(str(tmp_path / 'digits.h5'))}",),
    )  # fmt: skip
    sweep = SweptRuns(declared, tmp_path)
    sweep.run(Runner(tmp_path, VirtualRuns()))
    cut = tmp_path / "runs" / "trial-001-r2-s0"
    own = Trials(tmp_path, declared)
    assert own.all()[1].state == "cut" and load_summary(cut).stopped_early.endswith(CUT)
    open_again = SweptRuns(declared, tmp_path / "again")
    open_again.write()
    run = tmp_path / "again" / "runs" / "trial-000-r2-s0"
    own = Trials(tmp_path / "again", declared)
    own.start(0)
    run.mkdir(parents=True)
    (run / "evaluations.jsonl").write_bytes((tmp_path / "runs" / "trial-000-r2-s0" / "evaluations.jsonl").read_bytes())
    assert own.judge(0, run) is None and own.judge(0, run) is None


def test_a_runs_folder_must_be_a_sweeps(tmp_path):
    with pytest.raises(ConfigError, match="--output must be the folder of a run of `hpcdist sweep`; got"):
        trials.find_trial(tmp_path / "runs" / "it")


# --- what is refused --------------------------------------------------------------------------------------------------
@each(
    "case",
    [
        ({"pruner": "asha", "seeds": 2, "budget": {"samples": 9000}}, "--seeds must be 1 with --pruner asha"),
        ({"pruner": "asha", "budget": {"seconds": 9}}, "--pruner must be none if runs have fewer than 3 eval"),
        ({"over": ("batch_size=16,many",)}, "batch_size must be an integer"),
        ({"over": ("batch_sise=16",)}, "Did you mean 'batch_size'"),
        ({"metric": "acuracy"}, "metric must be one of accuracy, loss; got 'acuracy'"),
        ({"sampler": "tpee"}, "--sampler must be one of .*; got 'tpee'"),
        ({"pruner": "tpee"}, "--pruner must be one of .*; got 'tpee'"),
    ],
)
def test_a_sweep_is_checked_before_anything_runs(case, tmp_path):
    change, message = case
    with pytest.raises(ConfigError, match=message):
        SweptRuns(replace(DECLARED, **change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_optuna_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="sweep must have the packages of the extra sweep; got no module optuna"):
        SweptRuns(DECLARED, tmp_path)


# --- several runs at once ---------------------------------------------------------------------------------------------
def test_runs_at_the_same_time_have_cores_of_their_own(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: set(range(8)))
    assert share_cores(None, 2) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}] and share_cores(None, 16) == [set(range(8))]
    assert share_cores(2, 2) == [{0, 1, 2, 3}, {4, 5, 6, 7}] and share_cores(16, 1)[8:] == share_cores(8, 1)
    several = ranks_environment({}, 1, crowded=False, bound=False)
    assert several["PRTE_MCA_hwloc_default_binding_policy"] == "none"
    assert ranks_environment({}, 1, crowded=False) == {**AS_ROOT, "OMP_NUM_THREADS": "1"}


def test_an_interruption_ends_all_runs_that_are_under_way(tmp_path):
    script = tmp_path / "launch.py"
    script.write_text("import sys, time\nopen(sys.argv[-1] + '/begun', 'w')\ntime.sleep(600)")
    launcher = MpiLauncher("job.py", [sys.executable, str(script)], os.environ, shares=share_cores(2, 1))
    runs = [PlannedRun(str(n), "strategy", 1, n, (), f"runs/{n}", by_folder=True) for n in range(3)]
    making = Runner(tmp_path, launcher, 2)

    class Done(Exception):
        pass

    def enough() -> None:
        while len(list(tmp_path.glob("runs/*/begun"))) < 2:
            threading.Event().wait(0.01)

    def make() -> None:
        with suppress(KeyboardInterrupt):  # as which the interruption comes to the thread
            making.run_all(runs)

    with pytest.raises(Done), launcher:
        thread = threading.Thread(target=make)
        thread.start()
        enough()
        raise Done
    thread.join()
    assert not list(tmp_path.glob(f"runs/*/{FAILURE}")) and not (tmp_path / "runs" / "2").exists()


def test_a_failing_run_does_not_stop_the_others(tmp_path):
    class Failing(PretendedRuns):
        def run(self, run, folder):
            if run.seed % 2:
                raise RunError("error: a rank has died")
            super().run(run, folder)

    runs = [PlannedRun("it", "strategy", 1, seed, (), f"runs/{seed}") for seed in range(9)]
    failed = Runner(tmp_path, Failing(), 3).run_all(iter(runs))
    assert sorted(run.seed for run in failed) == [1, 3, 5, 7]
