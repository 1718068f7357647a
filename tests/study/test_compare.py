"""A comparison from its declaration to its table: with launchers that pretend, and once with mpirun."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from harness.cases import each
from harness.launch import IMPORTS, SETTINGS, SITE, launch_environment, wait_until
from hpcdist.config.merge import as_flags, load
from hpcdist.errors import ConfigError, DataError, RunError
from hpcdist.records import Evaluation, RecordWriter, StepRecord, append_evaluation, load_summary, record_path
from hpcdist.registry import catalogue
from hpcdist.tools import cli
from hpcdist.tools.compare import folder, functions, run_all
from hpcdist.tools.compare.comparison import ComparedRuns, search_within
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.launchers import MpiLauncher
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.compare.run_all import Runner, missing
from hpcdist.tools.compare.sweep import SweptRuns
from hpcdist.tools.report import read_runs, wording
from hpcdist.tools.runs import COMPARISON, FAILURE
from study import evidence
from study.pretended import PretendedRuns

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "digits.py"
DECLARED = Comparison(
    job=str(JOB),
    job_sha256=hashlib.sha256(JOB.read_bytes()).hexdigest(),
    strategies=("allreduce", "gossip_pull"),
    ranks=(1, 2),
    seeds=2,
    metric="accuracy",
    target=0.5,
    controls=False,
    settings=("epochs=1",),
)

SWEPT = Sweep(
    job=str(JOB), job_sha256="", strategy="allreduce", over=("batch_size=8,16",), trials=2, ranks=1, metric="loss"
)


def written(output: Path, **change: object) -> ComparedRuns:
    """A comparison that is written down in its folder, and has no runs yet."""
    comparison = ComparedRuns(replace(DECLARED, **change), output)
    comparison.write()
    return comparison


# --- all of it is checked before anything runs ------------------------------------------------------------------------
ONE_CYCLE = ("schedule.name=OneCycleLR", "schedule.max_lr=0.1", "schedule.total_steps=999")


@each(
    "case",
    [
        ({"strategies": ("gosip_pull",)}, "gossip_pull"),
        ({"strategies": ("softsync:split=2",)}, "strategy.* splits"),
        ({"settings": ("epoch=1",)}, "setting must be one of"),
        ({"settings": ("strategy=hardsync",)}, "--set and --config must leave strategy to --strategies"),
        ({"settings": ("seed=1",)}, "must leave seed to --seeds; got it there. Remove it."),
        ({"metric": "acuracy"}, "metric must be one of accuracy, loss; got 'acuracy'"),
        ({"baselines": ("dpp",)}, "baseline must be one of ddp, horovod"),
        ({"rates": {"hardsync": 0.1}}, "--rate must be one of allreduce, gossip_pull"),
        ({"rates": {"allreduce": 0.1}, "tune": 3}, "--rate must be omitted with --tune"),
        ({"settings": ONE_CYCLE, "tune": 3}, "--tune must be omitted with OneCycleLR, whose rates are not"),
        ({"strategies": ("parameter_server:servers=3",), "ranks": (2, 3)},
         "parameter_server .servers 3. must be able to run on one of the numbers of ranks"),
        ({"strategies": ("gosip_pull",)}, "^strategy must be one of adpsgd, .*; got 'gosip_pull'. Did you"),
        ({"strategies": ("allreduce", "gossip_pull", "allreduce")},
         r"--strategies must differ from each other; got two for runs/allreduce-r1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_before_anything_is_written(case, tmp_path):
    change, message = case
    with pytest.raises(ConfigError, match=message):
        ComparedRuns(replace(DECLARED, **change), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_same_strategy_with_other_options_is_another(tmp_path):
    two = ComparedRuns(
        replace(DECLARED, strategies=("softsync:splits=1", "softsync:splits=1,modulation=none")), tmp_path
    )
    assert len(two.plan) == 8 and len({run.folder for run in two.plan if run.ranks == 2}) == 4


def test_strategies_that_do_the_same_on_one_rank_share_its_runs(tmp_path):
    strategies = ("allreduce", "gossip_pull", "dion", "softsync:on_nonfinite=skip")
    found = ComparedRuns(replace(DECLARED, strategies=strategies, seeds=1, rates={"dion": 0.1}), tmp_path)
    folders = {run.name: (Path(run.folder).name, run.overrides) for run in found.plan if run.ranks == 1}
    assert folders["gossip_pull"] == folders["allreduce"] and len(set(folders.values())) == 3
    assert found.skipped == ["on one rank allreduce, gossip_pull all take the optimiser's steps, and share runs"]
    launcher = PretendedRuns()
    found.run(Runner(tmp_path, launcher))
    assert len(launcher.made) == 7 == len(set(launcher.made)) and not missing(found.plan, tmp_path)
    assert len(read_runs(tmp_path)) == 8
    rated = ComparedRuns(replace(DECLARED, rates={"gossip_pull": 0.1}), tmp_path / "rated")
    assert len({run.folder for run in rated.plan}) == 8 and not rated.skipped


def test_what_cannot_run_is_left_out_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue("baselines").load("horovod"), "why_not", staticmethod(lambda: "It is not there."))
    strategies = ("allreduce", "parameter_server:servers=3")
    found = ComparedRuns(replace(DECLARED, strategies=strategies, baselines=("horovod",), ranks=(2, 5)), tmp_path)
    assert [group.name for group in found.groups] == ["allreduce", "allreduce", "parameter_server (servers 3)"]
    served, *others = found.skipped
    assert served.startswith("parameter_server (servers 3) is left out on 2 ranks: strategy.servers must leave ")
    assert others == [f"horovod is left out on {ranks} ranks: It is not there." for ranks in (2, 5)]


@pytest.mark.parametrize("plan", [ComparedRuns, SweptRuns])
def test_a_folder_that_cannot_be_made_is_refused(plan, tmp_path):
    (tmp_path / "taken").touch()
    made = plan(SWEPT if plan is SweptRuns else DECLARED, tmp_path / "taken" / "below")
    with pytest.raises(ConfigError, match="--output must be a folder that can be made; got .*taken/below .Not a dir"):
        run_all.run_all(made, PretendedRuns())


def test_another_comparison_in_the_same_folder_is_refused_by_its_differences(tmp_path):
    ComparedRuns(DECLARED, tmp_path).write()
    ComparedRuns(DECLARED, tmp_path)
    with pytest.raises(ConfigError, match=r"--output must be a new folder.*seeds: 2 against 3 now"):
        ComparedRuns(replace(DECLARED, seeds=3), tmp_path)
    assert folder.read_experiment(tmp_path, Comparison) == DECLARED
    (tmp_path / COMPARISON).write_text('{"version": 9, "runs": []}')
    with pytest.raises(DataError, match="must hold an experiment of version 1; got version 9"):
        ComparedRuns(DECLARED, tmp_path)
    with pytest.raises(ConfigError, match="JOB must be given where there is no comparison to resume"):
        folder.read_experiment(tmp_path / "new", Comparison)


def test_without_a_folder_the_same_command_goes_on_and_another_one_has_a_new_folder(tmp_path):
    wanted, more = tmp_path / "compare-tiny", replace(DECLARED, seeds=3)
    assert folder.default(wanted, DECLARED) == wanted and not wanted.exists()
    written(wanted)
    assert folder.default(wanted, DECLARED) == wanted
    second = folder.default(wanted, more)
    assert second == tmp_path / "compare-tiny-2"
    written(second, seeds=3)
    assert (folder.default(wanted, DECLARED), folder.default(wanted, more)) == (wanted, second)


def test_a_simulation_goes_on_whatever_its_steps_were_measured_to_take(tmp_path):
    cluster = {"network": "20us,10Gbit/s", "compute": "measured"}
    measured = replace(DECLARED, virtual={**cluster, "step_s": {"8": 0.01}})
    folder.write(tmp_path / "simulate", measured, higher_is_better=True, groups=(), runs=())
    for compute, found in (("measured", "simulate"), ("0.1", "simulate-2")):
        declared = replace(DECLARED, virtual={**cluster, "compute": compute})
        assert folder.default(tmp_path / "simulate", declared) == tmp_path / found


def test_a_wrong_setting_is_named_before_the_folder_that_holds_another(tmp_path):
    written(tmp_path)
    with pytest.raises(ConfigError, match="Did you mean 'batch_size'"):
        ComparedRuns(replace(DECLARED, settings=(*DECLARED.settings, "batch_sise=3")), tmp_path)


def test_it_is_written_down(tmp_path):
    planned = written(tmp_path).plan
    found = json.loads((tmp_path / COMPARISON).read_text())
    assert (found["metric"], found["target"], found["reference"]) == ("accuracy", 0.5, "allreduce")
    assert found["higher_is_better"] is True and found["virtual"] is None and found["tuning"] is None
    assert [run["folder"] for run in found["runs"]] == [run.folder for run in planned]
    assert found["runs"][0]["set"] == list(planned[0].overrides)


def test_the_reference_is_the_first_where_allreduce_is_none(tmp_path):
    for first, other in (("softsync:splits=1", "gossip_pull"), ("gossip_pull", "softsync:splits=1")):
        written(tmp_path / first, strategies=(first, other))
        found = json.loads((tmp_path / first / COMPARISON).read_text())
        assert found["reference"] == first.replace(":splits=1", " (splits 1)")


# --- runs are made once, and a failure does not end the others --------------------------------------------------------
def test_runs_that_are_there_are_not_made_again_and_failed_ones_are(tmp_path):
    planned, first = written(tmp_path, ranks=(2, 3)).plan, PretendedRuns("gossip_pull")
    failed = Runner(tmp_path, first).run_all(planned)
    assert first.made == [run.folder for run in planned] and {run.name for run in failed} == {"gossip_pull"}
    assert "a rank has died" in (tmp_path / failed[0].folder / FAILURE).read_text()
    again = PretendedRuns()
    assert missing(planned, tmp_path) == failed and Runner(tmp_path, again).run_all(planned) == []
    assert again.made == [run.folder for run in failed] and not missing(planned, tmp_path)
    assert not (tmp_path / failed[0].folder / FAILURE).exists()


def test_an_interrupted_run_is_made_anew_or_goes_on_from_its_checkpoints(tmp_path):
    planned = written(tmp_path).plan
    for run, part in ((planned[0], "records-rank0000.jsonl"), (planned[1], "checkpoints/step-1")):
        (tmp_path / run.folder / part).parent.mkdir(parents=True)
        (tmp_path / run.folder / part).write_text("")
    Runner(tmp_path, PretendedRuns()).run_all(planned)
    assert not (tmp_path / planned[0].folder / "records-rank0000.jsonl").exists()
    assert (tmp_path / planned[1].folder / "checkpoints/step-1").exists()


def test_the_table(tmp_path, capsys):
    comparison = written(tmp_path, ranks=(2, 3))
    Runner(tmp_path, PretendedRuns("gossip_pull")).run_all(comparison.plan)
    comparison.show_table()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == "digits: 8 runs, 4 without a result; means over the seeds".split()
    assert ["allreduce", "3", "2", "0.9050", "4", "50"] in [row[:6] for row in rows]
    assert ["gossip_pull", "3", "0", "of", "2", *[wording.NONE] * 5] in [row[:10] for row in rows]


def test_seconds_to_the_target_are_one_number_on_the_terminal_the_page_in_csv_and_json(tmp_path, capsys):
    comparison = written(tmp_path, ranks=(2,), seeds=3)
    for run in comparison.plan:  # 8, 12 and 18 s: their geometric mean is 12, the other one 12.7
        values = (0.4, 0.49) if (run.name, run.seed) == ("gossip_pull", 1) else (0.4, 0.97)
        seconds = (8.0, 12.0, 18.0)[run.seed]
        evidence.write_run(tmp_path / run.folder, run.name, run.ranks, run.seed, values, seconds)
    comparison.show([])
    terminal, page = capsys.readouterr().out, (tmp_path / "report/index.html").read_text()
    shown = "12 (4.38 to 32.9)"
    assert "geometric mean" in terminal and shown in terminal and "8 at best (2 of 3)" in terminal
    assert "seconds to 50 %, geometric mean</th>" in page and "seconds of training, geometric mean" in page
    assert f">{shown}<" in page and ">8 at best<" in page
    (content,) = json.loads((tmp_path / "report/runs.json").read_text())["jobs"]
    found = {group["name"]: group["seconds_to_target"] for group in content["cells"]}
    assert found["allreduce"]["geometric_mean"] == pytest.approx(12) and found["gossip_pull"] is None
    with open(tmp_path / "report/runs.csv", encoding="utf-8") as lines:
        seconds = [row["time_to_target_s"] for row in csv.DictReader(lines)]
    assert math.prod(map(float, seconds[:3])) == pytest.approx(12**3) and seconds[3:] == ["8.0", "", "18.0"]


def test_rates_are_searched_on_seeds_of_their_own(tmp_path):
    declared = replace(DECLARED, tune=4, ranks=(2,), controls=True, strategies=("allreduce",), settings=())
    comparison, made = ComparedRuns(declared, tmp_path), PretendedRuns()
    chosen = comparison.tune(Runner(tmp_path, made))
    assert [(one.name, one.ranks, one.rate, one.between) for one in chosen] == [
        ("allreduce", 2, 0.008, False),  # 0.002, 0.001, 0.004, 0.008: the next is not tried
        ("serial, batch 32", 1, 0.008, False),
    ]
    assert (
        str(chosen[0])
        == "allreduce on 2 ranks: learning rate 0.008, though a neighbour was not tried: give --tune more runs"
    )
    assert len(made.made) == 8 and all(path.startswith("tuning/") for path in made.made)
    assert {load_summary(tmp_path / path).seed for path in made.made} == {1000}
    again = PretendedRuns()
    assert comparison.tune(Runner(tmp_path, again)) == chosen and again.made == []
    rates = {load({}, None, run.overrides)["optimizer"]["lr"] for run in comparison.plan}
    assert rates == {0.008}
    assert json.loads((tmp_path / COMPARISON).read_text())["tuning"]["chosen"][0]["rate"] == 0.008


def test_a_rate_whose_runs_fail_is_not_chosen(tmp_path):
    class Diverging(PretendedRuns):
        def run(self, run, folder):
            if "-lr=0.002-" in run.folder:
                raise RunError("NaN")
            super().run(run, folder)

    declared = replace(DECLARED, tune=3, ranks=(2,), strategies=("allreduce",))
    (chosen,) = ComparedRuns(declared, tmp_path).tune(Runner(tmp_path, Diverging()))
    assert chosen.rate == 0.001 and chosen.tried[0.002] is None and chosen.between


@pytest.mark.parametrize(("best", "runs"), [(0, 3), (2, 5), (-3, 6)])
def test_a_search_within_so_many_runs(best, runs):
    found, known = search_within(runs, lambda number, _: abs(number - best), lambda values: sum(values) / len(values))
    assert found == best and sum(map(len, known.values())) == runs
    assert {best - 1, best, best + 1} <= set(known)


def test_runs_that_are_left_repeat_the_best_and_its_neighbours():
    seen = []

    def measure(number: int, repeated: int) -> int:
        seen.append((number, repeated))
        return abs(number)

    assert search_within(8, measure, max)[0] == 0
    assert seen[:3] == [(0, 0), (-1, 0), (1, 0)] and seen[3] == (0, 1) and sorted(seen[6:])[-1] == (0, 2)
    assert search_within(1, measure, max) == (0, {0: [0]})


# --- what is shown ----------------------------------------------------------------------------------------------------
def test_without_a_terminal_each_run_has_a_line(tmp_path, capsys):
    planned = written(tmp_path, ranks=(2, 3)).plan
    making = Runner(tmp_path, PretendedRuns("gossip_pull"))
    with making.display("runs", len(planned)):
        making.run_all(planned)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 8 and all(f"{number} of 8  " in line for number, line in enumerate(lines, 1))
    assert any("allreduce, 2 ranks, seed 1: accuracy 0.9100, loss 0.0900" in line for line in lines)
    assert any("gossip_pull, 3 ranks, seed 0: FAILED: error: a rank has died" in line for line in lines)
    assert re.search(r"about \d+ s left", lines[0]) and "left" not in lines[-1]


def test_a_terminal_shows_the_current_runs_loss_and_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run = PlannedRun("allreduce", "strategy", 2, 0, ("budget.samples=400", "optimizer.lr=0.1"), "runs/a")
    with run_all.RunsDisplay("runs", 3) as shown:
        assert shown.lines() == []
        shown.begin(run, tmp_path)
        assert shown.lines() == ["allreduce, 2 ranks, rate 0.1, seed 0"]
        append_evaluation(tmp_path, Evaluation(1, 0, 100, 2.0, {"accuracy": 0.5, "loss": 9.0}))
        with RecordWriter(record_path(tmp_path, 0)) as records:
            for step, loss in enumerate((3.0, 0.75, None), 1):
                records.write(StepRecord(step, loss=loss))
        with open(record_path(tmp_path, 0), "a") as file:
            file.write('{"st')  # it is being written
        assert shown.lines() == ["allreduce, 2 ranks, rate 0.1, seed 0, 25%: accuracy 0.5000, loss 0.7500"]
        (tmp_path / "evaluations.jsonl").write_text("half\n")
        assert len(shown.lines()) == 1
        shown.end(run, tmp_path, "an error")
        assert shown.lines() == [] and shown.tasks[0].completed == 1


# --- launchers --------------------------------------------------------------------------------------------------------
def test_a_run_that_fails_ends_in_its_last_lines_and_one_that_left_ends_the_comparison(tmp_path):
    run = PlannedRun("a", "strategy", 3, 0, ("seed=0",), "runs/a")
    script = tmp_path / "launch.py"
    script.write_text(
        "import sys\nprint(sys.argv[1:])\nprint('the reason')\nsys.exit(75 if 'left' in sys.argv[1] else 4)"
    )

    def launched(word: str) -> MpiLauncher:
        return MpiLauncher("job.py", [sys.executable, str(script), word], os.environ)

    with pytest.raises(RunError, match="(?s)exit status 4 of .*; its last lines:.*--progress', 'off'.*the reason$"):
        launched("-n").run(run, tmp_path / "run")
    with pytest.raises(RunError, match=r"'train', 'job.py', '--output', .*'--baseline', 'ddp', '--set', 'seed=0'\]"):
        launched("-n").run(replace(run, name="ddp", kind="baseline"), tmp_path / "ddp")
    with pytest.raises(KeyboardInterrupt):
        launched("left").run(run, tmp_path / "run")


def hpcdist(*arguments: object) -> int:
    """Runs a command in this process; returns its exit status."""
    return typer.main.get_command(cli.app).main([*map(str, arguments)], standalone_mode=False)


# --- arguments -------------------------------------------------------------------------------------------------------
WHOLE = "--ranks must be whole numbers above 0, with commas between them; got "


@each(
    "case",
    [
        ("compare", [], "JOB must be given to start a comparison; got none"),
        ("compare", ["--output", "new"], "JOB must be given where there is no comparison to resume; got none"),
        ("compare", [JOB, "--ranks", "1,two"], f"{WHOLE}'1,two'"),
        ("compare", [JOB, "--ranks", "0"], f"{WHOLE}'0'"),
        ("compare", [JOB, "--target", "0.97"], "--target must be METRIC=VALUE; got '0.97'"),
        ("compare", [JOB, "--target", "accuracy"], "got 'accuracy'. Write it as accuracy=0.97."),
        *((command, [JOB, *more, "--target", "accuracy=95"],
           "--target of accuracy must be a share from 0 to 1; got 95. Write 95 %")
          for command, more in (("compare", ()), ("simulate", ()), ("sweep", ("--over", "batch_size=8,16")))),
        ("compare", [JOB, "--rate", "allreduce"], "--rate must be STRATEGY=RATE; got 'allreduce'. Write"),
        ("compare", [JOB, "--budget", "samples=0"], "--budget must be samples=N"),
        ("compare", ["nosuch.py"], "job must be a Python file; got nosuch.py, which does not exist"),
        ("compare", [JOB, "--slurm", "generic", "--launcher", "env"],
         "--launcher must be omitted with --slurm, .*; got 'env'"),
        ("compare", [JOB, "--slurm-set", "time_min=3"],
         "--slurm must be given with --slurm-set; got none. Such as --slurm generic."),
        ("sweep", [], "JOB must be given to start a sweep; got none"),
        ("sweep", ["--output", "new", "--over", "batch_size=8"], "JOB must be given to start a sweep; got none"),
        ("sweep", ["--output", "new"], "JOB must be given where there is no sweep to resume; got none, .* none"),
        ("sweep", [JOB], "--over must be given to start a sweep; got none. Such as --over batch_size=16,32"),
        ("sweep", [JOB, "--over", "batch_size=8", "--network", "1us,1B/s"], "--virtual must be given with --network"),
    ],
)  # fmt: skip
def test_wrong_arguments(case, tmp_path, monkeypatch):
    command, arguments, message = case
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        hpcdist(command, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_sweep_goes_on_by_its_folder_alone(tmp_path, monkeypatch):
    made = PretendedRuns()
    monkeypatch.setattr(functions, "mpi_launcher", lambda *given: made)
    monkeypatch.setattr(run_all, "find_spec", lambda name: None)  # no report: it takes seconds
    out = ("--output", tmp_path / "out")
    command = ("sweep", JOB, "--over", "batch_size=8,16", "--sampler", "grid", "--jobs", 2, *out)
    assert hpcdist(*command) == 0 and len(made.made) == 2
    (tmp_path / "out" / made.made[0] / "summary.json").unlink()
    assert hpcdist("sweep", *out) == 0 and made.made[2:] == made.made[:1]
    with pytest.raises(ConfigError, match="another: `hpcdist sweep --output .*out` resumes it"):
        hpcdist("compare", *out)


def test_a_sweep_runs_on_virtual_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(run_all, "find_spec", lambda name: None)
    data = f"data.path={json.dumps(str(tmp_path / 'digits.h5'))}"
    given = ("--over", "batch_size=8,16", "--sampler", "grid", "--budget", "samples=320", "--set", data)
    out = ("--output", tmp_path / "out")
    compute = ("--virtual", "--compute", "10ms", "--jobs", 1, "--ranks", 2)
    assert hpcdist("sweep", JOB, *given, *compute, *out) == 0
    trials = json.loads((tmp_path / "out" / "sweep.json").read_text())["trials"]
    found = [load_summary(tmp_path / "out" / trial["folders"][0]) for trial in trials]
    assert [summary.wall_s for summary in found] == [pytest.approx(0.1, rel=0.1)] * 2  # as many samples
    with pytest.raises(ConfigError, match="--slurm and --launcher must be omitted with virtual ranks; got one"):
        hpcdist("sweep", "--launcher", "mpirun -n", *out)


def test_a_sweep_runs_on_real_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(run_all, "find_spec", lambda name: None)  # no report: it takes seconds
    data = f"data.path={json.dumps(str(tmp_path / 'digits.h5'))}"
    given = ("--over", "batch_size=16", "--sampler", "grid", "--budget", "samples=320", "--ranks", 2, "--set", data)
    with launch_environment(IMPORTS) as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert hpcdist("sweep", JOB, *given, "--output", tmp_path / "out") == 0
    (trial,) = json.loads((tmp_path / "out" / "sweep.json").read_text())["trials"]
    assert load_summary(tmp_path / "out" / trial["folders"][0]).ranks == 2


def test_settings_of_a_file_become_flags_which_mean_the_same(tmp_path):
    (tmp_path / "a.toml").write_text(
        """
        epochs = 2
        clip_norm = inf
        [optimizer]
        name = "SGD"
        lr = 1e-5
        [schedule]
        name = "SequentialLR"
        milestones = [3]
        schedules = [{ name = "ConstantLR", factor = 0.5 }, { name = "ExponentialLR", gamma = 0.9 }]
        """
    )
    values = load({}, tmp_path / "a.toml", ["optimizer.momentum=0.9", "data.path=a b.h5"])
    assert load({}, None, as_flags(values)) == values


# --- all together -----------------------------------------------------------------------------------------------------
def test_a_comparison_by_mpirun_is_interrupted_and_goes_on(tmp_path, monkeypatch, capsys):
    wanted = ["--strategies", "softsync:splits=1", "--ranks", "1,2", "--seeds", "1", "--no-controls"]
    wanted += ["--budget", "samples=640", "--evaluations", "2", "--target", "accuracy=0.01", "--set", "batch_size=64"]
    command = [sys.executable, "-m", "hpcdist", "compare", JOB, *wanted]
    paths = os.pathsep.join([str(SITE), IMPORTS["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    for name, value in {**SETTINGS, "PYTHONPATH": paths, "PRTE_MCA_prte_tmpdir_base": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    with open(tmp_path / "log", "wb") as log:
        first = subprocess.Popen([*command, "--output", out], stderr=log)
        wait_until(lambda: len(list(out.glob("runs/*/output.log"))) == 2 or first.poll() is not None, 120)
        first.send_signal(signal.SIGTERM)  # a shell's background jobs ignore SIGINT
        assert first.wait(100) == 130, (tmp_path / "log").read_text()
    done = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/summary.json")}
    assert f"`hpcdist compare --output {out}` resumes it" in (tmp_path / "log").read_text()
    assert len(done) == 1

    monkeypatch.setattr(run_all, "find_spec", lambda name: None)  # no report: it takes seconds
    status, again = hpcdist("compare", "--output", out), capsys.readouterr()
    assert status == 0, again.err
    assert "1 of 2 runs are there already" in again.err
    assert all(path.stat().st_mtime_ns == at for path, at in done.items())
    planned = json.loads((out / COMPARISON).read_text())["runs"]
    summaries = [load_summary(out / run["folder"]) for run in planned]
    assert [found.samples for found in summaries] == [640] * 2
    assert [found.ranks for found in summaries] == [run["ranks"] for run in planned]
    assert len(re.findall("^ softsync .splits 1.", again.out, re.M)) == 2
