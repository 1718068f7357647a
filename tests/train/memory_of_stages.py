"""A job that prints the bytes that each rank takes to train a model in stages, and then rank 0 the whole one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hpcdist.bench.memory import peak_bytes
from hpcdist.comm.mpi.world import world
from train import staged


class Padded(nn.Linear):
    """A layer as large as any other, whose inputs are made as wide."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x.flatten(1), (0, self.in_features - 64)))


def model(width: int = 1024) -> nn.Sequential:  # 48 MiB of parameters
    return nn.Sequential(Padded(width, width), *(nn.Linear(width, width) for _ in range(11)))


job = replace(staged.job, model=model, defaults={**staged.job.defaults, "batch_size": 8, "budget": {"steps": 2}})


def main() -> None:
    comm = world()
    one = comm.split(comm.rank)

    def train(on, name, *options):
        staged.run(on, Path(name), *options, job=job)

    def peak(*arguments):
        return peak_bytes(lambda: train(*arguments), torch.device("cpu"))

    train(comm, "small", "model.width=64", "parallel.stages=2")  # imports what is needed
    stages = comm.gather(peak(comm, "staged", "parallel.stages=2"))
    if comm.rank == 0:
        print(json.dumps({"stages": stages, "whole": peak(one, "whole")}))


if __name__ == "__main__":
    main()
