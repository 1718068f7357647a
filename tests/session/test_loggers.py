"""Figures for other tools: what each gets, one that fails or is slow, a run that goes on, and ranks that serve."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpcdist import checkpoint
from hpcdist.comm.communicator import Failures
from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.records import StepRecord
from hpcdist.session import curves, loggers
from hpcdist.session.curves import Curves
from hpcdist.train.runs import specify
from train import tiny

MEASURED = ("loss", "learning_rate", "samples_per_second", "staleness", "bytes_per_step", "waiting_share")
TAGS = {*(f"train/{name}" for name in MEASURED), "test/accuracy", "test/loss"}
NOTES = """
import json
from hpcdist.session.loggers import Logger

class Notes(Logger):
    def __init__(self, run):
        run.folder.mkdir()
        self.file = open(run.folder / "notes.jsonl", "w")
        print(json.dumps([run.name, dict(run.settings), run.metrics]), file=self.file)

    def write(self, step, values):
        print(json.dumps([step, values]), file=self.file, flush=True)

    def close(self):
        self.file.close()

class Broken(Notes):
    def write(self, step, values):
        raise OSError("no more ink")

class Exiting(Notes):
    def __init__(self, run):
        raise SystemExit(3)
"""


def run(ranks: int, folder: Path, *overrides: str, resume: bool = False):
    def whole(comm):
        with tiny.training(comm, folder, "epochs=2", "log_every=5", *overrides) as made:
            return made.run(checkpoint.latest(made.checkpoints) if resume else None)

    return run_virtual(whole, ranks, compute=Constant(0.01))[0]


@pytest.fixture
def notes(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("notes.py").write_text(NOTES)
    return tmp_path / "run" / "notes-Notes" / "notes.jsonl"


def read(path: Path) -> tuple[list, dict[str, list]]:
    """What stands in notes: the first line, and (step, value) by name."""
    first, *lines = map(json.loads, path.read_text().splitlines())
    figures: dict[str, list] = {}
    for step, values in lines:
        for name, value in values.items():
            figures.setdefault(name, []).append((step, value))
    return first, figures


# --- tools ------------------------------------------------------------------------------------------------------------
def test_tensorboard_shows_a_run_that_went_on_as_one(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(2, tmp_path, "log=tensorboard", "checkpoint.every_steps=18")
    run(2, tmp_path, "log=tensorboard", resume=True)  # takes steps 19 to 24 again
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert set(found.Tags()["scalars"]) == TAGS
    steps = [event.step for event in found.Scalars("train/loss")]
    assert steps == sorted(set(steps)) and steps[-1] == 24 and len(steps) == 6
    assert [event.step for event in found.Scalars("test/accuracy")] == [12, 24]
    hyperparameters = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"optimizer.lr" in hyperparameters and b"strategy.overlap" in hyperparameters


def test_mlflow_shows_a_run_that_went_on_as_one(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    run(1, tmp_path, "log=mlflow", "checkpoint.every_steps=18")
    run(1, tmp_path, "log=mlflow", resume=True)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/run/mlflow/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("hpcdist").experiment_id])
    assert found.info.status == "FINISHED" and set(found.data.metrics) == TAGS
    assert found.data.params["optimizer.name"] == "AdamW"
    assert {m.step for m in client.get_metric_history(found.info.run_id, "test/accuracy")} == {23, 46}


def test_wandb_gets_an_offline_run_of_each_start_under_one_id(tmp_path):
    pytest.importorskip("wandb")
    run(1, tmp_path, "log=wandb", "checkpoint.every_steps=18")
    run(1, tmp_path, "log=wandb", resume=True)
    identity = (tmp_path / "run" / "wandb" / "run-id").read_text()
    files = [*(tmp_path / "run" / "wandb").rglob("*.wandb")]
    assert {file.name for file in files} == {f"run-{identity}.wandb"}
    assert any(b"test/accuracy" in file.read_bytes() for file in files)


# --- figures ----------------------------------------------------------------------------------------------------------
def test_figures_are_those_of_the_run_and_change_nothing(tmp_path, notes):
    plain = run(2, tmp_path / "plain")
    summary = run(2, tmp_path, "log=notes.py:Notes")
    assert summary.sha256 == plain.sha256
    (name, settings, metrics), figures = read(notes)
    assert (name, metrics) == ("run", ["test/accuracy", "test/loss"])
    assert settings["optimizer.lr"] == 0.01 and settings["strategy.name"] == "allreduce"
    assert set(figures) == TAGS
    assert [step for step, _ in figures["train/loss"]] == [5, 10, 12, 17, 22, 24]
    assert figures["test/accuracy"][-1] == (24, summary.metrics["accuracy"])
    assert figures["train/learning_rate"][0] == (5, 0.01) and figures["train/learning_rate"][-1][1] < 0.005
    assert all(0 <= share <= 1 for _, share in figures["train/waiting_share"])


def test_an_evaluation_is_written_once_where_a_server_leads_the_run_that_goes_on(tmp_path, notes):
    Path("notes.py").write_text(NOTES.replace("mkdir()", "mkdir(exist_ok=True)").replace('"w"', '"a"'))
    settings = ("log=notes.py:Notes", "strategy=parameter_server", "checkpoint.every_steps=24")
    for resume in (False, True):  # the second from the very end, where it evaluates again
        run(3, tmp_path, *settings, resume=resume)
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [line[0] for line in lines if "test/accuracy" in line[1]] == [12, 24]


def test_staleness_is_the_servers_where_they_apply_gradients(tmp_path, notes):
    summary = run(3, tmp_path, "log=notes.py:Notes", "strategy=softsync", "strategy.splits=2")
    _, figures = read(notes)
    assert set(figures) == TAGS, "a worker writes, with its loss and the servers' staleness"
    assert summary.staleness.max > 0 and max(value for _, value in figures["train/staleness"]) > 0


def test_the_next_worker_writes_where_the_first_has_died(tmp_path, notes):
    comm = SimpleNamespace(rank=1, size=2, failures=Failures(2, 1.0))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    second = Curves(("notes.py:Notes",), {"seed": 0}, comm, (0, 1), optimizer, tmp_path / "run", ("accuracy",))
    (tmp_path / "run").mkdir()
    second.open(first_step=1)
    second.add(StepRecord(1, samples=4, loss=3.0, computing_s=1.0))
    second.report()
    comm.failures.alive = (1,)
    second.add(StepRecord(2, samples=4, loss=2.0, computing_s=1.0, waiting_s=1.0, staleness=(0, 1)))
    second.report()
    second.close()
    wanted = {"learning_rate": 0.5, "bytes_per_step": 0, "loss": 2.0, "samples_per_second": 2.0, "waiting_share": 0.5}
    assert read(notes)[1] == {f"train/{name}": [(2, value)] for name, value in {**wanted, "staleness": 0.5}.items()}


# --- tools that are not there, fail, or are slow ----------------------------------------------------------------------
def test_a_tool_without_its_package_is_refused_before_the_run(tmp_path, monkeypatch):
    job = Path(__file__).parents[2] / "jobs" / "digits.py"
    (tmp_path / "no_such_package").mkdir()  # a folder of that name is none
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loggers.load("tensorboard"), "package", "no_such_package")
    with pytest.raises(ConfigError, match=r"log must name tools .* got 'tensorboard', .* \(pip install no_such_packag"):
        specify(job, None, ["log=tensorboard"])
    with pytest.raises(ConfigError, match="there is no package no_such_package"):
        loggers.require(["tensorboard"])
    with pytest.raises(UnknownNameError, match="log must be one of mlflow, tensorboard, wandb; got 'tensorbord'"):
        specify(job, None, ["log=tensorbord"])


def test_a_tool_that_fails_is_left_out(tmp_path, notes, caplog):
    summary = run(1, tmp_path, 'log=["notes.py:Broken","notes.py:Exiting","notes.py:Notes"]')
    assert summary.metrics and set(read(notes)[1]) == TAGS
    messages = [record.message for record in caplog.records]
    assert messages == [
        "log continues without notes.py:Exiting: SystemExit: 3",
        "log continues without notes.py:Broken: OSError: no more ink",
    ]


def test_no_step_waits_for_a_slow_tool(monkeypatch, caplog):
    monkeypatch.setattr(curves, "MAX_WAITING", 2)
    monkeypatch.setattr(curves, "PATIENCE_S", 0.1)
    may_write = threading.Event()
    slow = curves._Loggers(("slow",), lambda name: SimpleNamespace(write=lambda *_: may_write.wait(5), close=str), [])
    for step in range(5):
        slow.put(step, {}, None)  # one is being written, two wait
    slow.close()
    may_write.set()
    quick = curves._Loggers((), lambda name: None, [])
    quick._lost = 2
    quick.close()
    assert [record.message for record in caplog.records] == [
        "log is not written 0 s after the run: its last metrics may be lost",
        "log lacks 2 sets of metrics, which came faster than they could be written",
    ]
