"""Other libraries train as all-reduce does on equal settings, and leave the folder of a run."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from pathlib import Path

import pytest

from harness.launch import IMPORTS, launch
from hpcdist.records import load_run, load_summary, read_evaluations, read_records
from hpcdist.registry import catalogue

BASELINES = catalogue("baselines")
RANKS = Path(__file__).with_name("baseline_ranks.py")
JOB = """
import dataclasses
from torch import nn
from train import tiny

# Neither batch norm nor dropout, whose numbers DDP and Horovod average in ways of their own.
model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
job = dataclasses.replace(tiny.job, model=model)
"""
NAMES = [name for name in BASELINES.available() if BASELINES.load(name).why_not() is None]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of all runs, on two ranks."""
    folder = tmp_path_factory.mktemp("baselines")
    (folder / "plain.py").write_text(JOB)
    done = launch(2, [RANKS, folder, *NAMES], preloaded=("torch._dynamo",), env=IMPORTS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_folder_of_that_name_is_no_horovod(tmp_path, monkeypatch):
    folder = importlib.machinery.ModuleSpec("horovod", None, is_package=True)  # of a namespace
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder)
    assert "Horovod is not installed" in BASELINES.load("horovod").why_not()


def test_there_are_ddp_and_horovod():
    assert BASELINES.available() == ["ddp", "horovod"]


@pytest.mark.parametrize("name", BASELINES.available())
def test_it_takes_the_steps_of_all_reduce(runs, name):
    """An uneven last step of an epoch, accumulation, clipping and a schedule among them."""
    if name not in NAMES:
        pytest.skip("Horovod is not installed: hpcdist horovod build")
    own, ours = read_evaluations(runs / name), read_evaluations(runs / "allreduce")
    assert [(e.step, e.epoch, e.samples) for e in own] == [(e.step, e.epoch, e.samples) for e in ours]
    assert own[-1].samples >= 900 and len(own) >= 3 and own[-1].metrics["loss"] < own[0].metrics["loss"]
    for one, other in zip(own, ours, strict=True):
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1e-6)


@pytest.mark.parametrize("name", BASELINES.available())
def test_it_leaves_the_folder_of_a_run(runs, name):
    if name not in NAMES:
        pytest.skip("Horovod is not installed: hpcdist horovod build")
    summary, run = load_summary(runs / name), load_run(runs / name)
    assert (summary.strategy, summary.ranks, summary.workers) == (name, 2, 2)
    assert summary.samples == read_evaluations(runs / name)[-1].samples and summary.wall_s > 0
    assert summary.staleness.histogram.keys() == {0} and summary.seconds.computing > 0
    assert summary.bytes_per_step == 4 * (65 * 12 + 13 * 10), "a ring's: once the gradients, on two ranks"
    assert "library does not report" in " ".join(summary.remarks)
    assert run.settings["strategy"] == {"name": name} and run.settings["clip_norm"] == 1.0 and run.ended
    records = read_records(runs / name)
    assert [record.step for record in records[0]] == list(range(1, len(records[1]) + 1))


def test_settings_of_no_plain_loop_are_refused(runs):
    message = json.loads((runs / "refused.json").read_text())
    assert "on_nonfinite must be stop" in message and "which has a plain training loop; got another." in message


def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    done = launch(
        1,
        ["-m", "hpcdist", "train", tmp_path / "no.py", "--baseline", "ddp", "--output", tmp_path / "run"],
        env=IMPORTS,
    )
    assert done.returncode == 1 and "job must be a Python file; got" in done.stderr and "Traceback" not in done.stderr
