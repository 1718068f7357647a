"""Evaluate the model that the ranks stand for together; their own parameters stay as they are."""

from __future__ import annotations

import torch
from torch import nn

from hpcdist.comm.communicator import Communicator
from hpcdist.data.hdf5 import HDF5Dataset
from hpcdist.data.loader import Loader
from hpcdist.strategies import Strategy
from hpcdist.train.job import Job

BATCH = 1024  # samples evaluated at a time


def evaluate(
    job: Job, strategy: Strategy, comm: Communicator, dataset: HDF5Dataset, others: Communicator | None = None
) -> dict[str, float]:
    """Collective. Compute loss and metrics over `dataset`, shared among the replicas, on the strategy's consensus.

    The model is in evaluation mode meanwhile; afterwards parameters, buffers and mode are as they were.

    Args:
        comm: all ranks.
        others: the ranks that have the same part of the model in all replicas; None: each rank has a whole one.
    """
    with strategy.model.swapped(*strategy.consensus()):
        return evaluate_replica(job, strategy.model.module, comm, dataset, others)


def evaluate_replica(
    job: Job, module: nn.Module, comm: Communicator, dataset: HDF5Dataset, others: Communicator | None = None
) -> dict[str, float]:
    """Collective. Do the same on a module that is equal in all replicas, as it is.

    Of a model in stages the ranks without the last one get None for outputs.
    """
    others = comm if others is None else others
    device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    totals = torch.zeros(2 + len(job.metrics), dtype=torch.float64)  # samples, summed loss, summed metrics
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            share = others.failures.living.index(others.rank)
            for x, y in Loader(dataset, BATCH, worker=share, workers=len(others.failures.living), shuffle=False):
                x, y = x.to(device), y.to(device)
                outputs = module(x)
                if outputs is None:
                    continue
                values = [job.loss(outputs, y).double() * len(x)]
                values += [metric.per_sample(outputs, y).double().sum() for metric in job.metrics.values()]
                totals += torch.tensor([len(x), *map(float, values)], dtype=torch.float64)
    finally:
        module.train(training)
    comm.allreduce(totals)
    samples, loss, *sums = totals.tolist()
    metrics = {name: metric.finish(s / samples) for (name, metric), s in zip(job.metrics.items(), sums, strict=True)}
    return {**metrics, "loss": loss / samples}
