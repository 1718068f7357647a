"""A run's folder holds what is needed to repeat the run and to compare it with others."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import hpcdist
from harness.cases import each
from harness.launch import IMPORTS, find_mpirun, launch
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.merge import differing
from hpcdist.errors import CheckpointError, ConfigError, DataError
from hpcdist.records import Evaluation, RunRecord, Start, keep_evaluations, load_run, read_evaluations, run
from hpcdist.tools import cli
from hpcdist.tools.report.analysis import analyse
from hpcdist.tools.report.results import read_jobs
from hpcdist.tools.report.verdict import judge
from hpcdist.tools.runs import Run
from hpcdist.train import Trainer, load_job, runs

JOB = "import widths\nfrom train import tiny\njob = tiny.job\n"


@pytest.fixture(autouse=True)
def jobs(tmp_path, monkeypatch) -> Path:
    """A folder with a job and its neighbour."""
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    Path("jobs/it.py").write_text(JOB)
    Path("jobs/widths.py").write_text("WIDTH = 5\n")
    return tmp_path


def train(*overrides: str, output: str = "run", ranks: int = 2, resume: bool = False, **further):
    settings = ["data.path=digits.h5", "epochs=2", "checkpoint.every_steps=5", *overrides]
    arguments = {"output": Path(output), "resume": resume, "command": ["hpcdist", "train", "jobs/it.py"]} | further
    return run_virtual(lambda comm: runs.train(comm, Path("jobs/it.py"), None, settings, **arguments)[1], ranks)[0]


def test_run_json_says_all_that_a_run_was_started_with():
    for command in ("init -q", "add jobs", "-c user.name=a -c user.email=a@b commit -q -m first"):
        subprocess.run(["git", *command.split()], check=True)
    Path("jobs/it.py").write_text(f"{JOB}# changed\n")
    train("strategy=local_sgd", "optimizer.lr=none", "schedule=ExponentialLR", "schedule.gamma=0.9", ranks=3)
    found = load_run("run")

    content = Path("jobs/it.py").read_bytes()
    assert Path("run/job/it.py").read_bytes() == content
    assert found.job.path == "jobs/it.py" and found.job.sha256 == hashlib.sha256(content).hexdigest()
    assert found.job.copies == {
        "job/it.py": found.job.sha256, "job/widths.py": hashlib.sha256(b"WIDTH = 5\n").hexdigest(),
    }  # fmt: skip
    assert len(found.commit) == 40 and found.dirty
    assert (found.ranks, found.hosts, found.command) == (3, [platform.node()] * 3, ["hpcdist", "train", "jobs/it.py"])
    assert found.started <= found.ended and found.started.endswith("Z") and found.resumed == []
    assert (found.outcome, found.reason) == ("ended", None)
    assert found.versions == {
        "hpcdist": hpcdist.__version__, "torch": torch.__version__, "numpy": np.__version__,
        "python": platform.python_version(), "mpi": None,
    }  # fmt: skip

    assert found.cores == {platform.node(): len(os.sched_getaffinity(0))} and found.processors == os.cpu_count()
    assert len(found.load) == 2, "at the start and at the end"

    settings = found.settings
    assert (settings["epochs"], settings["batch_size"], settings["seed"]) == (2, 16, 11), "given, the job's, its own"
    assert settings["deadline_s"] == 300.0 and settings["model"] == {"width": 12}, "defaults"
    assert (settings["optimizer"]["lr"], settings["optimizer"]["betas"]) == (0.001, [0.9, 0.999]), "torch's own"
    assert settings["schedule"]["gamma"] == 0.9 and "last_epoch" in settings["schedule"]
    assert settings["strategy"]["name"] == "local_sgd" and settings["strategy"]["period"] > 0


def test_a_run_that_goes_on_keeps_its_first_start_and_adds_evaluations():
    whole = train("epochs=3", output="whole")
    evaluations = read_evaluations("whole")
    assert [(e.step, e.epoch, e.samples) for e in evaluations] == [(12, 1, 359), (24, 2, 718), (36, 3, 1077)]
    assert evaluations[-1].metrics == whole.metrics and set(evaluations[0].metrics) == {"accuracy", "loss"}
    assert evaluations[0].metrics != evaluations[1].metrics
    assert evaluations[0].seconds <= evaluations[1].seconds <= whole.wall_s
    line = json.loads(Path("whole/evaluations.jsonl").read_text().splitlines()[0])
    assert line.keys() == {"step", "epoch", "samples", "seconds", "metrics", "joules"}
    train("epochs=2")
    first = load_run("run")
    Path("jobs/widths.py").write_text("WIDTH = 6\n")
    resumed = train("epochs=3", resume=True)
    found = load_run("run")
    assert (found.started, found.ended, found.settings) == (first.started, first.ended, first.settings)
    (again,) = found.resumed
    assert found.last is again and again.settings["epochs"] == 3 and again.ended is not None
    assert again.went_on_from == "run/checkpoints/step-00000020" and found.went_on_from is None
    assert set(again.job.copies) == {"job-2/it.py", "job-2/widths.py"}, "what has changed does not replace what was"
    assert Path("run/job/widths.py").read_text() == "WIDTH = 5\n"

    assert [e.step for e in read_evaluations("run")] == [12, 24, 36], "that of step 24 was made again, and is once"
    assert [e.metrics for e in read_evaluations("run")] == [e.metrics for e in evaluations]
    assert resumed.sha256 == whole.sha256

    train("epochs=3", resume=True)
    assert len(load_run("run").resumed) == 2 and not Path("run/job-3").exists()


def test_a_resumed_run_with_other_settings_is_refused_or_says_what_changed_and_when():
    train("epochs=1")
    before = Path("run/run.json").read_bytes()
    other = ("epochs=2", "optimizer.lr=0.02", "optimizer.weight_decay=0.5", "schedule.gamma=0.9", "clip_norm=none")
    told = (
        "settings must be those of run/checkpoints/step-00000010 to resume from it; got optimizer.lr 0.01 → 0.02, "
        "optimizer.weight_decay 0.01 → 0.5, schedule.gamma 0.7 → 0.9, clip_norm 5.0 → none. Add --allow-changes"
    )
    with pytest.raises(ConfigError, match=re.escape(told)):
        train(*other, resume=True)
    assert Path("run/run.json").read_bytes() == before, "it has not begun"
    train("log_every=1", "checkpoint.keep=9", "eval_every_samples=100", "budget.steps=14", resume=True)
    assert Run("run").changes == [], "they don't change what is trained"

    rates = []

    def make(*arguments, **given):
        trainer = Trainer(*arguments, **given)
        rates.append(trainer)
        return trainer

    train(*other, resume=True, ranks=3, make=make, allow_changes=True)
    # 0.02, times 0.7 after step 7, then 0.9 after steps 14 and 21; 22 steps in all.
    for trainer in rates:
        (group,) = trainer.optimizer.param_groups
        assert group["weight_decay"] == 0.5 and trainer.schedule.gamma == 0.9
        assert group["lr"] == pytest.approx(0.02 * 0.7 * 0.9 ** (trainer.position.step // 7 - 1))
    values = "optimizer.lr 0.01 → 0.02, optimizer.weight_decay 0.01 → 0.5, schedule.gamma 0.7 → 0.9"
    found = Run("run").changes
    assert found == [f"settings changed at step 10: {values}, clip_norm 5.0 → none, ranks 2 → 3"]
    assert load_run("run").last.changed["clip_norm"] == [5.0, None]


def test_changes_that_can_not_be_made_are_refused():
    with pytest.raises(ConfigError, match="--resume must be given with --allow-changes; got none"):
        train(allow_changes=True)
    plain = ("epochs=1", "schedule=OneCycleLR", "schedule.max_lr=0.1", "schedule.total_steps=90", "schedule.per=step")
    train(*plain)
    with pytest.raises(CheckpointError, match="schedule.max_lr must be that of the checkpoint .*, 0.1; got 0.2. The"):
        train(*plain, "schedule.max_lr=0.2", resume=True, allow_changes=True)


def test_changes_that_a_later_start_has_taken_back_are_in_no_result():
    start = {"started": "2026-01-31T12:00:00Z", "command": [], "job": {"path": "", "sha256": "", "copies": {}}}
    start |= {"commit": None, "dirty": False, "ranks": 1, "hosts": [], "versions": {}, "settings": {}}
    resumed = [
        {**start, "step": 10, "changed": {"optimizer.lr": [1, 2]}},
        {**start, "step": 30, "changed": {"seed": [0, 1]}},
        {**start, "step": 20, "changed": {"ranks": [1, 2]}},
        {**start, "step": 25},
    ]
    run = RunRecord(**start, resumed=resumed)
    assert run.changes == {10: {"optimizer.lr": [1, 2]}, 20: {"ranks": [1, 2]}}
    run.resumed.append(Start(**start))
    assert run.changes == {}, "it began anew"


def test_the_report_holds_a_run_that_was_resumed_with_other_settings_apart(capsys):
    for seed in (1, 2):
        train("epochs=1", f"seed={seed}", output=f"runs/{seed}")
    train("epochs=1", "seed=2", "optimizer.lr=0.02", output="runs/2", resume=True, allow_changes=True)
    cli._run(["report", "runs"], True)
    change = "settings changed at step 10: optimizer.lr 0.01 → 0.02"
    assert f"hpcdist: runs/2: {change}\n" in capsys.readouterr().err
    (evidence,) = read_jobs([Path("runs")])
    findings = analyse(evidence)
    first, second = findings.groups
    assert change not in first.name and change in second.name and (len(first.runs), len(second.runs)) == (1, 1)
    caveats = judge(findings).caveats
    assert f"`runs/2` was resumed with other settings, and forms its own group: {change}." in caveats


def test_a_run_that_failed_says_when():
    with pytest.raises(Exception, match="gradients must be finite"):
        train("optimizer=SGD", "optimizer.lr=1e30", "schedule=none", "clip_norm=none")
    found = load_run("run")
    assert found.ended is not None and found.outcome == "failed"
    assert found.reason.startswith("NonFiniteError: gradients must be finite") and "\n" not in found.reason
    assert Run("run").state == "failed" and "gradients must be finite" in Run("run").failure


def test_settings_that_differ():
    base = {"epochs": 2, "output": "x", "strategy": {"name": "local_sgd", "period": 4, "seed": 1, "compression": None}}
    other = {**base, "output": "y", "strategy": {**base["strategy"], "compression": {"name": "qsgd", "levels": 4}}}
    third = {"epochs": 3, "strategy": {"name": "allreduce", "period": 9}}
    assert differing({"a": base, "b": base}) == {}
    assert differing({"a": base, "b": other, "c": third}) == {
        "epochs": {"a": "2", "b": "2", "c": "3"},
        "strategy.compression.name": {"b": "qsgd"},
    }


def test_old_folders_have_no_run_json_and_damaged_files_are_refused(tmp_path):
    assert load_run(tmp_path) is None and read_evaluations(tmp_path) == []
    keep_evaluations(tmp_path, 3)
    run.end_run(tmp_path)
    assert not (tmp_path / "run.json").exists() and not (tmp_path / "evaluations.jsonl").exists()
    Path("run.json").write_text("{}")
    with pytest.raises(DataError, match="run.json must be what a run was started with; got "):
        load_run(".")
    whole = Evaluation(1, 1, 4, 0.5, {"loss": float("inf")})
    written = Path("evaluations.jsonl")
    written.write_bytes(b'{"step":1,"epoch":1,"samples":4,"seconds":0.5,"metrics":{"loss":Infinity}}\n{"step":2')
    assert read_evaluations(".") == [whole], "a line that was cut short is left out"
    written.write_text('{"step":1}\n')
    with pytest.raises(DataError, match='evaluations.jsonl:1 must be an evaluation; got b\'{"step":1}'):
        read_evaluations(".")


def test_a_run_goes_on_with_its_data_wherever_they_lie_and_with_no_others():
    """Of the same shape: a label has been corrected."""
    train("epochs=1", "checkpoint.every_steps=10")
    checksums = load_run("run").settings["data"]["checksums"]
    Path("digits.h5").rename("moved.h5")
    train("epochs=2", "data.path=moved.h5", resume=True)
    with h5py.File("moved.h5", "r+") as file:
        file["train/y"][70] = (file["train/y"][70] + 1) % 10
    with pytest.raises(ConfigError, match=rf"must be those of .*; got data.checksums.train {checksums['train']} → "):
        train("epochs=3", "data.path=moved.h5", resume=True)
    train("epochs=3", "data.path=moved.h5", resume=True, allow_changes=True)
    found = load_run("run").last
    assert found.changed.keys() == {"data.checksums.train"}
    assert found.settings["data"]["checksums"]["test"] == checksums["test"]


ENDS = """
import itertools, os, sys
from train import tiny
from dataclasses import replace
import typer
steps = itertools.count(1)
def stop():
    HOW
def loss(outputs, targets):
    if next(steps) == 9:
        stop()
    return tiny.job.loss(outputs, targets)
job = replace(tiny.job, PART)
"""


@each(
    "case",
    [
        ("loss=loss", "sys.exit(0)", r"sys.exit\(0\) at .*it.py:8"),
        ("loss=loss", "exit()", r"sys.exit\(None\) at "),
        ("loss=loss", "raise typer.Exit", r"sys.exit\(0\) at .*it.py:8"),
        ("model=lambda: stop()", "sys.exit('enough')", r"sys.exit\('enough'\) at .*it.py:8"),
        ("data=lambda path: stop()", "sys.exit(3)", r"sys.exit\(3\) at .*it.py:8"),
    ],
)
def test_a_jobs_code_that_ends_the_process_fails(case):
    part, how, got = case
    output = f"{part} {how}"
    Path("jobs/it.py").write_text(ENDS.replace("PART", part).replace("HOW", how))
    with pytest.raises(ConfigError, match=f"it.py must not end the process while its run is active; got {got}"):
        train(*(["data.path=other/digits.h5"] if "data" in part else []), output=output)
    if part == "loss=loss":
        assert load_run(output).outcome == "failed" and not Path(output, "summary.json").exists()


def test_what_is_no_end_of_the_process_is_raised_as_it_is():
    Path("jobs/it.py").write_text(ENDS.replace("PART", "loss=loss").replace("HOW", "raise RuntimeError('its own')"))
    with pytest.raises(RuntimeError, match="its own"):
        train()


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")
@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_with_status_0_ends_the_job_with_another(how):
    rank = "rank = os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK'))"
    how = f"{rank}\n    if rank == '1': {how}"
    Path("jobs/it.py").write_text(ENDS.replace("PART", "loss=loss").replace("HOW", how))
    words = ["-m", "hpcdist", "train", "jobs/it.py", "--set", "data.path=digits.h5", "--output", "run"]
    job = launch(2, words, env=IMPORTS)
    assert job.returncode != 0 and not Path("run/summary.json").exists(), job.stderr
    told = job.stderr.count(f"must not end the process while its run is active; got {how.split(': ')[-1]}")
    assert told == 1 if "sys" in how else told >= 1, job.stderr


def test_a_process_that_vanishes_has_another_status_and_says_why(capfd):
    Path("jobs/it.py").write_text("import os\nos._exit(0)\n")
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            load_job(Path("jobs/it.py"))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert capfd.readouterr().err.count("must not end the process while it is imported; got os._exit(0). Put") == 1
