"""Ranks that are killed: workers are gone on without, a server ends the run, and what is left can be resumed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from comm.jobs_here import run
from harness.launch import find_mpirun
from hpcdist.records import load_summary, read_records

ULFM = ["--with-ft", "ulfm"]  # Open MPI's User-Level Failure Mitigation: mpirun lets the others live


def _survives() -> bool:
    if find_mpirun() is None:
        return False
    help_text = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True).stdout
    return "Open MPI" in help_text


pytestmark = pytest.mark.skipif(not _survives(), reason="only Open MPI's mpirun lets other ranks outlive a killed one")

JOB = """
import os, signal, threading, time
from pathlib import Path
import torch
import hpcdist as hd
from hpcdist.config import JobConfig, load
from hpcdist.data import importers
from hpcdist.train import Job, Metric, Trainer, accuracy

VICTIM, STEP, OPTIONS, RESUME = {victim}, {step}, {options}, {resume!r}
comm = hd.init(deadline_s=20)
calls = 0

def loss(outputs, y):
    global calls
    calls += outputs.requires_grad
    if comm.rank == VICTIM and calls == STEP:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.cross_entropy(outputs, y)

job = Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    loss=loss,
    metrics={{"accuracy": Metric(accuracy)}},
    data=lambda path: importers.load("digits")(None, path),
    defaults={{"epochs": 3, "batch_size": 16, "optimizer": {{"name": "SGD", "lr": 0.2}}, "seed": 3}},
)
folder = Path({folder!r})
values = load({{**job.defaults, "data": {{"path": str(folder / "digits.h5")}}}}, None, OPTIONS)
trainer = Trainer(job, JobConfig(**values), comm, folder / "run", None)
if comm.rank == 0 and VICTIM == 0:  # a server has no step of its own
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
trainer.run(Path(RESUME) if RESUME else None)
trainer.close()
"""


def job(folder: Path, size: int, *options: str, victim: int = -1, step: int = 10, resume: str = ""):
    text = JOB.format(victim=victim, step=step, options=list(options), folder=str(folder), resume=resume)
    return run(folder, text, size, options=ULFM, timeout_s=90)[0]


def events(folder: Path, rank: int) -> list[str]:
    return [record.event for record in read_records(folder / "run")[rank] if record.event]


@pytest.mark.parametrize(
    "options",
    [
        ["strategy=hardsync"],
        ["strategy=hardsync", "strategy.servers=2"],
        ["strategy=softsync", "strategy.splits=1"],
        ["strategy=parameter_server"],
        ["strategy=ssp", "strategy.bound=1"],
        ["strategy=downpour"],
        ["strategy=easgd"],
    ],
    ids=" ".join,
)
def test_a_killed_worker_is_gone_on_without(tmp_path, options):
    done = job(tmp_path, 4, *options, victim=3)
    assert done.returncode == 0, done.stderr
    assert events(tmp_path, 0) == ["goes on without rank 3: it has died"]
    summary = load_summary(tmp_path / "run")
    assert summary.lost_ranks == [3]
    assert summary.metrics["accuracy"] > 0.8
    if options[0] == "strategy=hardsync":
        assert summary.staleness.max == 0
        left = 2 if len(options) == 1 else 1
        assert left in {len(record.staleness) for record in read_records(tmp_path / "run")[0]}


def test_what_is_left_saves_a_checkpoint_from_which_as_many_ranks_go_on(tmp_path):
    done = job(tmp_path, 4, "strategy=hardsync", "epochs=2", "checkpoint.every_steps=30", victim=2, step=40)
    assert done.returncode == 0, done.stderr
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000030", "step-00000060"] or len(saved) == 2, saved
    latest = tmp_path / "run" / "checkpoints" / saved[-1]
    again = job(tmp_path, 3, "strategy=hardsync", "epochs=3", resume=str(latest))
    assert again.returncode == 0, again.stderr
    assert load_summary(tmp_path / "run").ranks == 3


def test_a_killed_server_ends_the_run_with_a_message(tmp_path):
    done = job(tmp_path, 3, "strategy=parameter_server", "epochs=2000", "checkpoint.every_steps=20", victim=0)
    assert done.returncode != 0
    # In a step, or between two steps, where all ranks take part.
    met = "server rank 0 has died, and its part of the parameters", "rank 0 has died; this call needs all of them"
    assert any(message in done.stderr for message in met), done.stderr
    assert "Resume from the last checkpoint" in done.stderr


def test_a_strategy_that_needs_all_ranks_ends_with_a_message(tmp_path):
    done = job(tmp_path, 3, "strategy=allreduce", "epochs=50", victim=2)
    assert done.returncode != 0
    assert re.search(r"failed on rank [01]: MPI_ERR_PROC_FAILED.*rank 2 has died; this call needs", done.stderr)
