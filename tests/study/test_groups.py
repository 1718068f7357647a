"""The runs of a study's groups: each is made once, and known by its settings; one that fails keeps no other back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpcdist.errors import ConfigError, HpcdistError, RunError
from hpcdist.records import load_summary
from hpcdist.tools.runs import FAILURE
from kit.groups import TUNING, GroupRuns, at_rate, declare_group, search
from kit.output import start
from study.pretended import PretendedRuns

ROOT = Path(__file__).parents[2]

JOB = """
from kit.loop import OwnRun
from jobs_of_tests import job

def loop(settings, folder):
    def body(comm):
        from hpcdist import strategies
        from hpcdist.model.flat import FlatModel
        from hpcdist.records import StepRecord
        from torch import nn
        cls = strategies.load(settings["strategy"]["name"])
        strategy, own = cls(cls.Config(), comm, FlatModel(nn.Linear(2, 1))), OwnRun(comm, settings, folder)
        start = comm.now()
        comm.compute()
        own.write(StepRecord(1, samples=3))
        if comm.rank == 0:
            own.evaluate(1, 6, 0.5, {"accuracy": settings["x"]})
        own.end(strategy, comm.now() - start, {"accuracy": settings["x"]}, slowest=1)
    return body
"""


@pytest.fixture
def job(tmp_path) -> Path:
    (tmp_path / "jobs_of_tests.py").write_text((ROOT / "jobs" / "digits.py").read_text())
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


def groups(**settings: object) -> dict:
    where = {"strategy": "allreduce", "loop": "job.py:loop", **settings}
    return {
        ranks: declare_group(f"allreduce on {ranks}", ranks, {**where, "batch": ranks}, loop="job.py:loop")
        for ranks in (2, 1)
    }


def test_every_run_is_made_once_and_comes_by_cell(job, tmp_path, capsys):
    launcher = PretendedRuns()
    study = GroupRuns(job, tmp_path / "out", launcher=launcher)
    two, one = groups().values()
    found = study.make({"a": two, "b": one, "as a": two}, [3, 1])
    assert [[run.summary.seed for run in runs] for runs in found.values()] == [[3, 1]] * 3
    assert found["a"] == found["as a"] and [run.summary.ranks for run in found["b"]] == [1, 1]
    assert found["a"][0].settings["batch"] == 2 and len(found["a"][0].curve) == 2
    assert len(launcher.made) == 4 and "4 of 4" in capsys.readouterr().err

    again = GroupRuns(job, tmp_path / "out", launcher=launcher).make({"a": two, "b": one}, [1, 2])
    assert again["a"][0] == found["a"][1] and len(launcher.made) == 6, "more seeds are added"
    listed = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {run["name"] for run in listed["runs"]} == {"allreduce on 2", "allreduce on 1"}
    assert listed["metric"] == "accuracy" and len(listed["runs"]) == 4


def test_a_run_is_another_one_with_other_settings_or_another_job(job, tmp_path):
    launcher = PretendedRuns()

    def make(**settings: object) -> int:
        GroupRuns(job, tmp_path / "out", launcher=launcher).make(groups(**settings), [0])
        return len(launcher.made)

    assert [make(), make(x=1), make(x=1), make(x=2)] == [2, 4, 4, 6]
    job.write_text(JOB + "# changed\n")
    assert make(x=2) == 8


def test_a_run_that_fails_does_not_keep_the_others_from_being_made(job, tmp_path):
    with pytest.raises(RunError, match=rf"1 runs have failed: see {FAILURE} in .*allreduce_on_2.*runs them again"):
        GroupRuns(job, tmp_path, launcher=PretendedRuns("allreduce on 2")).make(groups(), [0])
    launcher = PretendedRuns()
    study = GroupRuns(job, tmp_path, launcher=launcher)
    study.make(groups(), [0])
    assert [Path(run).name[:14] for run in launcher.made] == ["allreduce_on_2"]
    with pytest.raises(RunError, match=rf"allreduce_on_1.* has failed: see {FAILURE} there"):
        failing = GroupRuns(job, tmp_path, launcher=PretendedRuns("allreduce on 1, optimizer.lr=0.5"))
        failing.measure(at_rate(groups()[1], 0.5), [1000])


def test_rates_are_chosen_on_runs_that_no_report_shows(job, tmp_path, capsys):
    study = GroupRuns(job, tmp_path, launcher=PretendedRuns())
    found = study.each(lambda rate: study.measure(at_rate(groups()[1], rate), [1000]), [0.008, 0.004], "rates")
    better, worse = (found[rate][0].summary.metrics["accuracy"] for rate in (0.008, 0.004))
    assert better > worse and "rates: 2 of 2" in capsys.readouterr().err
    study.make(groups(), [1000], "one learner", TUNING)
    assert len(list((tmp_path / TUNING).iterdir())) == 4 and not (tmp_path / "comparison.json").exists()


def test_a_loop_of_its_own_runs_on_virtual_ranks(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = declare_group("one", 2, {"strategy": {"name": "allreduce"}, "x": 0.5}, {"compute": "20ms"}, "job.py:loop")
    with GroupRuns(job, tmp_path, cluster={"network": "1ms,inf"}) as study:
        ((run,),) = study.make({"one": one}, [7]).values()
    found = load_summary(run.folder)
    assert (found.strategy, found.ranks, found.workers, found.seed, found.samples) == ("allreduce", 2, 2, 7, 6)
    assert found.wall_s == pytest.approx(0.02) and found.slowest == 1
    assert run.curve[0].samples == 6 and run.curve[0].metrics == found.metrics == {"accuracy": 0.5}
    assert not list(run.folder.glob("records-*")) and found.energy.not_measured == "the run has a loop of its own"


def test_what_can_not_be_is_refused(job, tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError, match=r"workers must be at least 1; got 0\. Give as many as there are cores"):
        GroupRuns(job, tmp_path, workers=0)

    def main() -> None:
        raise HpcdistError("it must be so; got another")

    monkeypatch.setattr(sys, "argv", ["study.py"])
    with pytest.raises(SystemExit, match="1"):
        start(main)
    assert "error: it must be so; got another" in capsys.readouterr().err


@pytest.mark.parametrize("best", [-12, -3, 0, 1, 9])
def test_the_best_is_found_and_nothing_is_measured_twice(best):
    measured = []

    def measure(number: int) -> int:
        measured.append(number)
        return abs(number - best)

    assert search(measure, lambda found: found, 0, known := {}) == best
    assert sorted(measured) == sorted(known) and {best - 1, best, best + 1} <= set(known)
    measured.clear()
    assert search(measure, lambda found: found, -100, known) == best and not measured, "from what is known"
