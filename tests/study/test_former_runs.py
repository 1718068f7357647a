"""Folders that commit 8a448906 has written, with former names of strategies' options. The archive stays as it is."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import hpcdist as hd
from harness.launch import launch
from hpcdist.tools.runs import Run

FORMER = Path(__file__).with_name("former.tar.xz")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    with tarfile.open(FORMER) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_read_by_current_names_and_resumed(folder):
    run = Run(folder / "run")
    assert run.settings["strategy"]["include_self"] is False and "draw_self" not in run.settings["strategy"]
    given = [
        "strategy=gossip_pull",
        "strategy.include_self=false",
        "batch_size=4",
        "checkpoint.every_steps=3",
        "epochs=2",
    ]
    words = ["-m", "hpcdist", "train", "job.py", "--resume", "--output", "run"]
    done = launch(2, [*words, *(word for setting in given for word in ("--set", setting))])
    assert done.returncode == 0, done.stderr
    assert len(Run(folder / "run").evaluations) > len(run.evaluations)


@pytest.mark.parametrize(("name", "runs"), [("run", 1), ("simulation", 6), ("sweep", 20)])
def test_reports_read_it(folder, name, runs):
    rows = hd.read_runs(name)
    assert len(rows) == runs and rows["metric.accuracy"].min() > 0.3


def test_a_sweep_is_not_continued_with_former_names(folder):
    done = subprocess.run(
        [sys.executable, "-m", "hpcdist", "sweep", "--output", "sweep"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "strategy.draw_self must be given as strategy.include_self, its name now" in done.stderr
