"""The job of the study of accuracy, and the loop of its protocols: a user's own, with plain SGD of constant rate."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import make_friedman1
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import hpcdist as hd
from hpcdist.comm.communicator import Communicator
from hpcdist.data import HDF5Dataset, importers
from hpcdist.train import Job, Metric, squared_error
from kit.loop import OwnRun

SAMPLES = 1000  # of the training set


def model(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def data(path: Path) -> None:
    """Write Friedman's first function ("Multivariate adaptive regression splines", 1991) as a table."""
    x, y = make_friedman1(SAMPLES * 5 // 4, n_features=10, noise=1.0, random_state=0)  # a fifth is the test set
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "friedman1.npy"
        np.save(table, np.column_stack([x, y]).astype(np.float32))
        importers.load("table")(table, path, standardise="features")


job = Job(
    model=model,
    loss=nn.functional.mse_loss,
    metrics={"rmse": Metric(squared_error, finish=math.sqrt, higher_is_better=False)},
    data=data,
    defaults={
        "epochs": 80,
        "eval_every": 10,
        "batch_size": 10,  # of each worker
        "optimizer": {"name": "Adam", "lr": 0.01},
        "schedule": {"name": "ExponentialLR", "gamma": 0.97},
    },
)


# --- a run of a protocol ----------------------------------------------------------------------------------------------
def train(settings: dict[str, Any], folder: Path) -> Callable[[Communicator], None]:
    """Train with plain SGD of constant rate; look at the test set after every so many updates.

    The initialisation depends on the seed alone, the order of the samples on seed and worker.
    """
    splits = {name: HDF5Dataset(Path(settings["data"]["path"]), name) for name in ("train", "test")}
    (x, y), test = (split.batch(range(len(split))) for split in splits.values())
    batch, updates, ended_s = settings["batch_size"], settings["updates"], []

    def body(comm: Communicator) -> None:
        hd.init(comm=comm)
        torch.manual_seed(settings["seed"])
        net = model()
        average = AveragedModel(net) if settings["average_iterates"] else None
        optimizer = torch.optim.SGD(net.parameters(), lr=settings["optimizer"]["lr"])
        optimizer = hd.DistributedOptimizer(optimizer, net, strategy=settings["strategy"]["name"])
        own, rmse = OwnRun(comm, settings, folder), []

        def updated(record) -> None:
            """Look where updates are made: on the server, or in the one process."""
            own.write(record)
            if average is not None and record.clock > updates / 2:
                average.update_parameters(net)
            if record.clock % settings["every"] == 0:
                rmse.append(root_mean_square_error(average or net, *test))
                own.evaluate(record.clock, record.clock * batch, comm.now(), {"rmse": rmse[-1]})

        strategy = optimizer.strategy
        strategy.records.write = updated
        workers = len(strategy.config.workers(comm.size))
        if strategy.is_worker:
            worker = comm.rank - (workers > 1)
            drawn = batches(rows_of(worker, workers, settings["own"], len(x)), batch, settings["seed"], worker)
            for _, chosen in zip(range(updates // workers), drawn):
                comm.compute()
                optimizer.zero_grad()
                job.loss(net(x[chosen]), y[chosen]).backward()
                optimizer.step()
                record = replace(optimizer.record, samples=batch)
                (updated if workers == 1 else own.write)(record)
            strategy.pause()
        else:
            strategy.serve(optimizer.attachment.local_step)
        ended_s.append(comm.now())
        comm.barrier()
        own.end(strategy, max(ended_s), {"rmse": rmse[-1]} if rmse else {})

    return body


def rows_of(worker: int, workers: int, own: int, samples: int) -> Tensor:
    """List the samples that a worker has for the whole run: all, or a part that no other worker has."""
    return torch.arange(samples) if own == samples else torch.arange(samples).tensor_split(workers)[worker][:own]


def batches(rows: Tensor, batch: int, seed: int, worker: int) -> Iterator[Tensor]:
    """Yield batches of the same size without end, cut from one permutation of the samples after another."""
    generator = torch.Generator().manual_seed(1000 * (worker + 1) + seed)
    pool = rows[:0]
    while True:
        while len(pool) < batch:
            pool = torch.cat([pool, rows[torch.randperm(len(rows), generator=generator)]])
        yield pool[:batch]
        pool = pool[batch:]


@torch.no_grad()
def root_mean_square_error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return math.sqrt((model(x) - y).double().square().mean())
