"""A job that prints the bytes that each rank takes to train a model in stages, and then rank 0 the whole one."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path

from torch import nn

from benchmarks.runner import peak_bytes
from hpcdist.comm.mpi.world import world
from hpcdist.data import importers
from train import staged

M_MMAP_THRESHOLD = -3  # mallopt(3)


class Padded(nn.Linear):
    """A layer as large as any other, whose inputs are made as wide."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x.flatten(1), (0, self.in_features - 64)))


def model(width: int = 1024) -> nn.Sequential:  # 48 MiB of parameters
    return nn.Sequential(Padded(width, width), *(nn.Linear(width, width) for _ in range(11)))


def few(path: Path) -> None:
    importers.load("digits")(None, path, test_fraction=0.05)


SETTINGS = {**staged.job.defaults, "batch_size": 8, "budget": {"steps": 2}}
job = replace(staged.job, model=model, data=few, defaults=SETTINGS)


def main() -> None:
    # So that freed tensors go back at once: glibc's heap may keep those of less than 32 MiB, and has holes.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 1 << 20)
    comm = world()
    one, cut = comm.split(comm.rank), f"parallel.stages={comm.size}"

    def train(on, name, *options):
        staged.run(on, Path(name), *options, job=job)

    def peak(*arguments):
        return peak_bytes(lambda: train(*arguments))

    train(comm, "small", "model.width=64", cut)  # imports what is needed
    stages = comm.gather(peak(comm, "staged", cut))
    if comm.rank == 0:
        print(json.dumps({"stages": stages, "whole": peak(one, "whole")}))


if __name__ == "__main__":
    main()
