"""The memory that each rank takes to train a model in stages, beside a rank that trains the whole one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hpcdist.bench.memory import peak_bytes
from train import staged


class Padded(nn.Linear):
    """A layer as large as any other, whose inputs are made as wide."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x.flatten(1), (0, self.in_features - 64)))


def model(width: int = 1024) -> nn.Sequential:  # 48 MiB of parameters
    return nn.Sequential(Padded(width, width), *(nn.Linear(width, width) for _ in range(11)))


job = replace(staged.job, model=model, defaults={**staged.job.defaults, "batch_size": 8, "budget": {"steps": 2}})


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, exact=True)
def test_memory_falls_as_the_number_of_stages_grows(ranks, shared_tmp_path):
    def body(comm):
        one = comm.split(comm.rank)

        def train(on, name, *options):
            staged.run(on, shared_tmp_path / name, *options, job=job)

        def peak(*arguments):
            return peak_bytes(lambda: train(*arguments), torch.device("cpu"))

        train(comm, "small", "model.width=64", "parallel.stages=2")  # imports what is needed
        part = peak(comm, "staged", "parallel.stages=2")
        return part, peak(one, "whole") if comm.rank == 0 else None

    (part, whole), (other, _) = ranks(body)
    if whole is None:
        pytest.skip("the system does not tell the peak of the resident set")
    assert whole > 3 * 48 * 2**20, "parameters, gradients, a copy of the parameters for an evaluation"
    assert [part / whole, other / whole] == pytest.approx([1 / 2, 1 / 2], rel=0.15)
