"""Runs of a small job without chance in its layers, whose model is in stages or whole, in double precision."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hpcdist.config import JobConfig, load
from hpcdist.records import Summary
from hpcdist.train import Trainer
from train import tiny


class Doubled(nn.Module):
    def forward(self, x):
        return x.flatten(1).double()


def model(width: int = 12) -> nn.Sequential:
    layers = [Doubled(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    layers += [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)]
    return nn.Sequential(OrderedDict(zip("hgfedcba", layers, strict=True))).double()  # layers may have any name


job = replace(
    tiny.job,
    model=model,
    defaults={
        "batch_size": 16,
        "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
        "seed": 11,
        "budget": {"steps": 12},
    },
)


def trainer(comm, folder: Path, *overrides: str, job=job, report=None) -> Trainer:
    """Collective."""
    values = load({**job.defaults, "data": {"path": str(folder / "digits.h5")}}, None, overrides)
    return Trainer(job, JobConfig(**values), comm, folder / "run", report)


def run(comm, folder: Path, *overrides: str, job=job, resume=None) -> tuple[Summary, dict[str, torch.Tensor]]:
    """Collective. The summary of a run, and the parameters of all stages of this rank's replica."""
    made = trainer(comm, folder, *overrides, job=job)
    summary = made.run(resume)
    own = {name: p.detach().clone() for name, p in made.replica.module.named_parameters()}
    made.close()
    return summary, own


def alone(comm, folder: Path, *overrides: str, job=job) -> tuple[Summary, dict[str, torch.Tensor]]:
    """Collective. The same of a whole model on one process, which each rank trains for itself."""
    one = comm.split(comm.rank)
    result = run(one, folder / f"alone-{comm.rank}", *overrides, job=job)
    one.close()
    return result
