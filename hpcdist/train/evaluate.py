"""Evaluate the consensus of the ranks, or the average of the iterates, without changing the ranks' parameters."""

from __future__ import annotations

import torch
from torch import nn

from hpcdist.comm.communicator import Communicator
from hpcdist.data.loader import Loader
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.session.misfit import named_misfits
from hpcdist.strategies import Strategy
from hpcdist.train.job import Job, JobData

BATCH = 1024  # samples in a batch of an evaluation
ETA = 3  # of IterateAverage: with 3 the second half of the steps has 15/16 of the weight; more with larger values


def evaluate(
    job: Job, strategy: Strategy, comm: Communicator, dataset: JobData, others: Communicator | None = None
) -> dict[str, float]:
    """Collective. Return loss and metrics of the strategy's consensus; the replicas divide the data set among them.

    Parameters, buffers and the training mode are the same afterwards.

    Args:
        comm: all ranks.
        others: the ranks with the same part of the model, in all replicas; None if each rank has a whole model.
    """
    with strategy.model.swapped(*strategy.consensus()):
        return evaluate_replica(job, strategy.model.module, comm, dataset, others)


def evaluate_replica(
    job: Job, module: nn.Module, comm: Communicator, dataset: JobData, others: Communicator | None = None
) -> dict[str, float]:
    """Collective. Return loss and metrics of a module that is equal in all replicas; see `evaluate`.

    In a model in stages only the rank with the last stage has outputs and adds to the sums over `comm`; on the others
    `module` returns None, but they must call it for as many batches.
    """
    others = comm if others is None else others
    device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    totals = torch.zeros(2 + len(job.metrics), dtype=torch.float64)  # samples, summed loss, summed metrics
    training, path = module.training, getattr(dataset, "path", None)
    module.eval()
    try:
        with torch.no_grad():
            index = others.failures.alive.index(others.rank)
            for x, y in Loader(dataset, BATCH, worker=index, workers=len(others.failures.alive), shuffle=False):
                x, y = x.to(device), y.to(device)
                with named_misfits(path, "test", module, x=x, y=y) as at:
                    at["outputs"] = outputs = module(x)
                    if outputs is None:
                        continue
                    values = [job.loss(outputs, y).double() * len(x)]
                    for name, metric in job.metrics.items():
                        at["part"] = f"the metric {name}"
                        values.append(metric.per_sample(outputs, y).double().sum())
                totals += torch.tensor([len(x), *map(float, values)], dtype=torch.float64)
    finally:
        module.train(training)
    comm.allreduce(totals)
    samples, loss, *sums = totals.tolist()
    metrics = {name: metric.finish(s / samples) for (name, metric), s in zip(job.metrics.items(), sums, strict=True)}
    return {**metrics, "loss": loss / samples}


class IterateAverage:
    """The average of a model's parameters and buffers over the steps of one rank; later steps have more weight.

    A control for studies: it shows the effect of averaging without communication. w̄ₜ = (1 − a) w̄ₜ₋₁ + a wₜ at step t,
    with a = (η + 1)/(t + η), so that the number of steps need not be known.

    Reference: Ohad Shamir, Tong Zhang, "Stochastic gradient descent for non-smooth optimization: convergence results
    and optimal averaging schemes", 2013, section 4.

    Args:
        comm: the ranks that hold the same part of the model, one of each replica.

    Raises:
        ConfigError: there are several replicas.
    """

    def __init__(self, model: FlatModel, comm: Communicator):
        if comm.size > 1:
            raise ConfigError(
                f"average_iterates must be false on more than one rank; got true on {comm.size}. It is a control that "
                "shows the effect of averaging without communication: remove it."
            )
        self._model, self.steps = model, 0
        self.params = [tensor.detach().clone() for tensor in model.params]
        self.buffers = [tensor.detach().clone() for tensor in model.buffers]

    def add(self) -> None:
        """Add the current parameters and buffers to the average."""
        self.steps += 1
        part = (ETA + 1) / (self.steps + ETA)
        model = self._model
        pairs = zip((*self.params, *self.buffers), (*model.params, *model.buffers), strict=True)
        kinds = [*("mean" for _ in self.params), *model.flat_buffers.kinds]
        for (average, now), kind in zip(pairs, kinds, strict=True):
            if kind == "mean":
                average.lerp_(now.detach(), part)
            else:
                average.copy_(now)  # a counter, such as batch normalisation's
