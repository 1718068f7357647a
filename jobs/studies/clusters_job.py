"""The published toy task of asynchronous local SGD: which of four classes a point of a mixture of Gaussians is of.

Each class has eight clusters, with centres on the unit sphere in 512 dimensions and a deviation of 0.5 along each axis.
A hidden layer of 65,000 units learns 128,000 points; 10,000 of these are evaluated, as in the publication. The name of
the data file ends with the number of points.

mpirun -n 5 hpcdist train jobs/studies/clusters_job.py --set strategy=async_diloco --set strategy.period=20

Reference: Bo Liu et al., "Asynchronous local-SGD training for language modeling", 2024, and the code that it publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hpcdist as hd
from hpcdist.comm.communicator import Communicator
from hpcdist.data import HDF5Dataset
from hpcdist.data.writer import Split, create
from hpcdist.train import Job, Metric, accuracy
from kit.loop import OwnRun

DIMENSIONS, CLASSES, CLUSTERS, DEVIATION = 512, 4, 8, 0.5
EVALUATED = 10_000
ADAMW = {"lr": 2e-4, "weight_decay": 1e-3}


def model(hidden: int = 65_000) -> nn.Module:
    return nn.Sequential(nn.Linear(DIMENSIONS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def data(path: Path) -> None:
    """Draw the points, as many of each cluster, and write them in random order."""
    count = int(path.stem.rpartition("-")[2])
    draw = np.random.default_rng(42)
    centres = draw.standard_normal((CLASSES * CLUSTERS, DIMENSIONS))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    cluster = draw.permutation(np.arange(count) % len(centres))
    x = (centres[cluster] + DEVIATION * draw.standard_normal((count, DIMENSIONS))).astype(np.float32)
    y = cluster // CLUSTERS
    test = draw.permutation(count)[:EVALUATED]
    create(
        path,
        {"train": Split.of(x, y), "test": Split.of(x[test], y[test])},
        task="classification",
        source="A mixture of 32 Gaussians in 512 dimensions",
        classes=[str(number) for number in range(CLASSES)],
    )


job = Job(
    model=model,
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": Metric(accuracy)},
    data=data,
    defaults={
        "data": {"path": "data/clusters-128000.h5"},
        "batch_size": 32,  # of each worker
        "optimizer": {"name": "AdamW", **ADAMW},
    },
)


# --- a run of the study -----------------------------------------------------------------------------------------------
def train(settings: dict[str, Any], folder: Path) -> Callable[[Communicator], None]:
    """Train until all workers together have drawn so many batches: who is free draws the next one, so fast ones more.

    In a job each worker has its part of an epoch, and all meet to evaluate. Here nobody waits: the worker that has just
    read the common parameters when one more part of the batches has been drawn looks at them. A new AdamW begins in
    each period, as in the published code.
    """
    splits = (HDF5Dataset(Path(settings["data"]["path"]), name) for name in ("train", "test"))
    (x, y), test = (split.batch(range(len(split))) for split in splits)
    drawn = batches(len(x), settings["batch_size"], settings["seed"])
    taken, due, ended_s, found = 0, 0, 0.0, {}

    def body(comm: Communicator) -> None:
        nonlocal taken, due, ended_s, found
        hd.init(comm=comm)
        torch.manual_seed(settings["seed"])
        net = model(**settings["model"])
        inner = torch.optim.AdamW(net.parameters(), **ADAMW)
        options = dict(settings["strategy"])
        optimizer = hd.DistributedOptimizer(inner, net, strategy=options.pop("name"), **options)
        strategy, own = optimizer.strategy, OwnRun(comm, settings, folder)
        strategy.records.write = own.write
        exchanged = True
        while strategy.is_worker and (taken < settings["batches"] or not exchanged):
            chosen, taken = next(drawn), taken + 1
            comm.compute()
            optimizer.zero_grad()
            job.loss(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
            exchanged = optimizer.record.bytes_sent > 0
            own.write(replace(optimizer.record, samples=len(chosen)))
            if exchanged:
                inner.state.clear()
            if exchanged and taken >= due:
                due = max(min(taken + settings["every"], settings["batches"]), taken + 1)
                ended_s, found = comm.now(), {"accuracy": share_right(net, *test)}
                own.evaluate(taken, taken * settings["batch_size"], ended_s, found)
        if strategy.is_worker:
            strategy.pause()
        else:
            strategy.serve(optimizer.attachment.local_step)
        comm.barrier()
        own.end(strategy, ended_s, found)

    return body


def batches(samples: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield the numbers of samples, of one pass in random order after another."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(samples, generator=generator).split(batch)


@torch.no_grad()
def share_right(net: nn.Module, x: Tensor, y: Tensor) -> float:
    return (net(x).argmax(1) == y).double().mean().item()
