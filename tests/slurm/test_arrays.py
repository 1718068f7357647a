"""A comparison's runs as job arrays: their scripts, what is refused, and what is said of tasks; Slurm is pretended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from hpcdist.errors import ConfigError
from hpcdist.tools import cli
from hpcdist.tools.compare import run_all
from hpcdist.tools.compare.experiment import Comparison
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.runs import FAILURE
from hpcdist.tools.slurm import arrays, history, limits, queue
from hpcdist.tools.slurm.render import render
from hpcdist.tools.slurm.spec import Site
from hpcdist.tools.slurm.state import State
from hpcdist.tools.slurm.watch import facts
from study.pretended import PretendedRuns

DECLARED = Comparison(
    job="jobs/digits.py", strategies=("allreduce",), ranks=(1, 4), seeds=2, metric="accuracy", threads=3
)
JOB = """
import dataclasses
from train import tiny

job = dataclasses.replace(tiny.job, data=lambda path: path.write_text("made"))
"""


def planned(ranks: int, seed: int) -> PlannedRun:
    return PlannedRun("it", "strategy", ranks, seed, ("strategy=sgp", f"seed={seed}"), f"runs/it-r{ranks}-s{seed}")


RUNS = [planned(4, 0), planned(1, 0), planned(4, 1)]


def test_there_is_an_array_for_each_number_of_ranks(bash):
    one, four = arrays.specify(DECLARED, RUNS, Path("my out"), "conda", ["ranks_per_node=2", "time_min=9", "at_once=1"])
    assert [(spec.nodes, spec.ranks_per_node, len(spec.cases)) for spec in (one, four)] == [(1, 1, 1), (2, 2, 2)]
    assert (four.site, four.time_min, four.name) == ("conda", 9, "compare-digits")
    found = render(four.model_copy(update={"doctor": False}), Site())
    assert "#SBATCH --array=0-1%1" in found.text and '--output="my out/runs/%x-%A_%a.out"' in found.text
    assert found.text.index("OMP_NUM_THREADS=3") and "#SBATCH --cpus-per-task=3" in found.text
    assert bash.run(found, SLURM_ARRAY_TASK_ID="1")[0] == 0
    (arguments,) = bash.launched()
    train = arguments[arguments.index("hpcdist") :]
    assert train == [
        *("hpcdist", "train", "jobs/digits.py", "--output", "my out/runs/it-r4-s1", "--resume"),
        *("--set", "strategy=allreduce", "--set", "strategy=sgp", "--set", "seed=1"),
    ]
    assert [spec.nodes for spec in arrays.specify(DECLARED, RUNS, Path("out"), "conda")] == [1, 1]


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({"tune": 3}, [], "--tune must be 0 with --slurm, whose runs don't wait for each other; got 3. Search"),
        ({"baselines": ("ddp",)}, [], "--baselines must be omitted with --slurm, .*; got ddp. Compare with them"),
        ({}, ["nodes=2"], "--slurm-set must leave nodes to the comparison or the sweep; got it there. Remove it."),
        ({}, ["ranks_per_node=3"], "ranks_per_node must divide each larger number of --ranks; got 3 for 4 ranks"),
        ({}, ["time_min=0"], "time_min must be greater than or equal to 1; got 0"),
    ],
)
def test_what_no_array_can_do_is_refused(change, overrides, message):
    with pytest.raises(ConfigError, match=message):
        arrays.specify(replace(DECLARED, **change), RUNS, Path("out"), "generic", overrides)


class PretendedSlurm:
    """Takes jobs, whose tasks have the states that a test gives them."""

    def __init__(self, monkeypatch):
        self.jobs, self.states = [], {}
        monkeypatch.setattr(queue, "ask", self.ask)
        monkeypatch.setattr(limits, "refusals", lambda *given: ())
        monkeypatch.setattr(queue, "states", lambda job: [State(*one) for one in self.states[job]])

    def ask(self, *words: str) -> str:
        self.jobs.append(str(12 + len(self.jobs)))
        return self.jobs[-1]


def hpcdist(*arguments: str) -> int:
    return typer.main.get_command(cli.app).main(list(arguments), standalone_mode=False)


def test_runs_are_submitted_looked_at_and_submitted_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_all, "find_spec", lambda name: None)  # no report: it takes seconds
    Path("it.py").write_text(JOB)
    cluster, made = PretendedSlurm(monkeypatch), PretendedRuns()
    wanted = ["--strategies", "allreduce,gossip_pull", "--ranks", "2,3", "--seeds", "1", "--no-controls"]
    wanted += ["--output", "out", "--slurm", "generic"]
    assert hpcdist("compare", "it.py", *wanted, "--slurm-set", "warn_s=9999") == 1
    assert "error: warn_s must be less than the time limit" in capsys.readouterr().err and not Path("out").exists()

    assert hpcdist("compare", "it.py", *wanted) == 0
    assert capsys.readouterr().out == "12\n13\n" and Path("data/digits.h5").read_text() == "made"
    first, second = history.read(Path("out"))
    assert [path.is_dir() for path in (*first.folders, *second.folders)] == [True] * 4
    runs = {run["folder"]: run for run in json.loads(Path("out/comparison.json").read_text())["runs"]}

    def ends_well(folder: Path) -> None:
        run = runs[folder.relative_to("out").as_posix()]
        made.run(PlannedRun(run["name"], "strategy", run["ranks"], 0, tuple(run["set"]), ""), folder)

    ends_well(first.folders[0])
    Path(first.log.replace("%a", "1")).write_text("a\nRuntimeError: no memory\n")
    cluster.states = {
        "12": [("12_0", "COMPLETED"), ("12_1", "FAILED")],
        "13": [("13_[1]", "PENDING"), ("13_0", "RUNNING")],
    }
    assert hpcdist("compare", "--output", "out") == 1
    told = capsys.readouterr()
    assert "1 of 4 runs have ended; Slurm tasks: 1 running, 1 waiting" in told.err and "3 without a result" in told.out
    assert "RuntimeError: no memory" in (first.folders[1] / FAILURE).read_text()
    assert facts("12", first, [])["run"] == "out/runs/12: 1 of 2 runs have ended"

    ends_well(second.folders[0])
    assert hpcdist("compare", "--output", "out", "--slurm", "generic") == 0
    assert [folder for entry in history.read(Path("out"))[2:] for folder in entry.folders] == [first.folders[1]]
    assert not (first.folders[1] / FAILURE).exists(), "it waits again"

    for folder in (first.folders[1], second.folders[1]):
        ends_well(folder)
    cluster.states.clear()
    assert hpcdist("compare", "--output", "out") == 0, "Slurm is not asked again, and nothing is left to make"
    assert "4 of 4 runs are there already" in capsys.readouterr().err
