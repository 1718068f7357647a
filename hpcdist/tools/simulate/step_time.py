"""Measure how long a job's own step takes on this machine, with one thread."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch

from hpcdist.config import JobConfig
from hpcdist.data.hdf5 import HDF5Dataset
from hpcdist.data.loader import Loader
from hpcdist.train import Job
from hpcdist.train.loop import own_device

WARM_UP, STEPS = 2, 7


def measure_step(job: Job, config: JobConfig, samples: int) -> float:
    """Return the median of the seconds of a few steps with so many samples: forward, backward, the optimiser's.

    More samples than there are take longer in proportion.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            return _median_s(job, config, samples)
    finally:
        torch.set_num_threads(threads)


def _median_s(job: Job, config: JobConfig, samples: int) -> float:
    device = own_device(0)
    torch.manual_seed(config.seed)
    module = job.model(**config.model).to(device)
    optimizer = config.optimizer.build(module.parameters())
    with HDF5Dataset(Path(config.data.path), "train") as data:
        x, y = (tensor.to(device) for tensor in next(iter(Loader(data, min(samples, len(data))))))
    parts = list(zip(x.split(config.batch_size), y.split(config.batch_size), strict=True))

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        losses = []
        for x_part, y_part in parts if config.accumulation > 1 else [(x, y)]:
            loss = job.loss(module(x_part), y_part) * (len(x_part) / len(x))
            loss.backward()
            losses.append(loss.detach())
        return sum(losses, torch.zeros(()).to(device))

    taken = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        optimizer.step(evaluate).item()
        taken.append(time.perf_counter() - start)
    return median(taken[WARM_UP:]) * samples / len(x)
