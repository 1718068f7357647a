"""Runs of a small job without chance in its layers, whose model is in stages or whole, in double precision."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hpcdist.records import Summary
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
        "data": tiny.job.defaults["data"],
        "batch_size": 16,
        "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
        "seed": 11,
        "budget": {"steps": 12},
    },
)


def run(comm, folder: Path, *overrides: str, job=job, resume=None) -> tuple[Summary, dict[str, torch.Tensor]]:
    """Collective. The summary of a run, and the parameters of all stages of this rank's replica."""
    with tiny.training(comm, folder, *overrides, of=job) as made:
        summary = made.run(resume)
        return summary, {name: p.detach().clone() for name, p in made.replica.module.named_parameters()}


def alone(comm, folder: Path, *overrides: str, job=job) -> tuple[Summary, dict[str, torch.Tensor]]:
    """Collective. The same of a whole model on one process, which each rank trains for itself."""
    one = comm.split(comm.rank)
    result = run(one, folder / f"alone-{comm.rank}", *overrides, job=job)
    one.close()
    return result
