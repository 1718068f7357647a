"""Evaluation on what the ranks stand for together, their own parameters left as they are."""

from __future__ import annotations

import torch

from hpcdist.comm.communicator import Communicator
from hpcdist.data.hdf5 import HDF5Dataset
from hpcdist.data.loader import Loader
from hpcdist.strategies import Strategy
from hpcdist.train.job import Job

BATCH = 1024  # samples evaluated at a time


def evaluate(job: Job, strategy: Strategy, comm: Communicator, dataset: HDF5Dataset) -> dict[str, float]:
    """Collective. Loss and metrics over `dataset`, shared among the ranks, on the strategy's consensus.

    The model is in evaluation mode meanwhile; afterwards parameters, buffers and mode are as they were.
    """
    module, model = strategy.model.module, strategy.model
    device = next((t.device for t in (*model.params, *model.buffers)), torch.device("cpu"))
    totals = torch.zeros(2 + len(job.metrics), dtype=torch.float64)  # samples, summed loss, summed metrics
    training = module.training
    module.eval()
    try:
        with model.swapped(*strategy.consensus()), torch.no_grad():
            share = comm.living.index(comm.rank)
            for x, y in Loader(dataset, BATCH, worker=share, workers=len(comm.living), shuffle=False):
                x, y = x.to(device), y.to(device)
                outputs = module(x)
                values = [job.loss(outputs, y).double() * len(x)]
                values += [metric.per_sample(outputs, y).double().sum() for metric in job.metrics.values()]
                totals += torch.tensor([len(x), *map(float, values)], dtype=torch.float64)
    finally:
        module.train(training)
    comm.allreduce(totals)
    samples, loss, *sums = totals.tolist()
    found = {name: metric.finish(s / samples) for (name, metric), s in zip(job.metrics.items(), sums, strict=True)}
    return {**found, "loss": loss / samples}
