"""A job that takes a second: a few hundred digits, a model with everything that makes resuming hard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from hpcdist.comm.virtual import run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.config.merge import load
from hpcdist.data import importers
from hpcdist.records import Summary
from hpcdist.train import Job, Metric, Trainer, accuracy

job = Job(
    model=lambda width=12: nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10)
    ),
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": Metric(accuracy)},
    data=lambda path: importers.load("digits")(None, path, test_fraction=0.8),  # 360 or so to train on
    defaults={
        "data": {"path": "data/digits.h5"},  # which tests name in folders of their own
        "epochs": 3,
        "batch_size": 16,
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "schedule": {"name": "StepLR", "step_size": 7, "gamma": 0.7, "per": "step"},
        "clip_norm": 5.0,
        "seed": 11,
    },
)


End = tuple[Summary, list[Tensor]]  # of a run, and of its parameters and buffers


def trainer(comm, folder: Path, *overrides: str, of: Job | None = None, report=None, **leaving) -> Trainer:
    """Collective. Trains this job, or another one, on the digits in the folder."""
    chosen = of or job
    values = load({**chosen.defaults, "data": {"path": str(folder / "digits.h5")}}, None, overrides)
    return Trainer(chosen, JobConfig(**values), comm, folder / "run", report, **leaving)


@contextmanager
def training(comm, folder: Path, *overrides: str, **given) -> Iterator[Trainer]:
    """Collective. A trainer, which is closed unless the context raises."""
    made = trainer(comm, folder, *overrides, **given)
    yield made
    made.close()


def run(comm, folder: Path, *overrides: str, resume: Path | None = None, **given) -> End:
    """Collective. The summary of a run, and the parameters and buffers at its end."""
    with training(comm, folder, *overrides, **given) as made:
        summary = made.run(resume)
        return summary, [tensor.clone() for tensor in (*made.model.params, *made.model.buffers)]


def require_same(found: Sequence[End], expected: Sequence[End]) -> None:
    """Runs, as `run` returns them on each rank, have ended on the same bits."""
    differ = "resumed, parameters differ: all state must be declared by self.state, as by self.state.value"
    for (summary, tensors), (other, others) in zip(found, expected, strict=True):
        assert (summary.sha256, summary.metrics) == (other.sha256, other.metrics), differ
        assert summary.samples == other.samples, "steps were recorded twice or not at all"
        assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True)), differ


def uninterrupted(ranks: int, folder: Path, *overrides: str) -> Summary:
    """The summary of a whole run on so many virtual ranks."""
    return run_virtual(lambda comm: run(comm, folder, *overrides)[0], ranks)[0]


# The same job as a file: each rank leaves a file `pid-N` once it trains, and comes no further than to step UP_TO.
STUCK = """
import dataclasses, itertools, os, pathlib, time
from train import tiny

steps = itertools.count(1)

def loss(outputs, targets):
    pathlib.Path(f"pid-{os.getpid()}").touch()
    if next(steps) > UP_TO:
        time.sleep(600)
    return tiny.job.loss(outputs, targets)

job = dataclasses.replace(tiny.job, loss=loss)
"""
