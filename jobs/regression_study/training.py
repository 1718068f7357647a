"""One run of a protocol on virtual ranks: a user's loop, with batches from the samples that a worker has."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

import hpcdist as hd
from hpcdist.comm.virtual import Jitter, Network, run_virtual
from hpcdist.data import HDF5Dataset
from hpcdist.train import load_job

JOB = Path(__file__).parents[1] / "regression.py"


def train(data: Path, settings: dict) -> dict:
    """Trains with plain SGD to the last of `marks`, numbers of updates at each of which the test set is looked at.

    The parameters' initialisation depends on the seed alone; the order of the samples on seed and worker.
    """
    started_s, job = time.perf_counter(), load_job(JOB)
    splits = {name: HDF5Dataset(data, name) for name in ("train", "test")}
    (x, y), test = (split.batch(range(len(split))) for split in splits.values())
    workers, marks = settings["workers"], settings["marks"]
    rmse: dict[int, float] = {}
    staleness: list[int] = []

    def body(comm):
        hd.init(comm=comm)
        torch.manual_seed(settings["seed"])
        model = job.model()
        average = AveragedModel(model) if settings["averaged"] else None
        optimizer = torch.optim.SGD(model.parameters(), lr=settings["rate"])
        optimizer = hd.DistributedOptimizer(optimizer, model, strategy="parameter_server")

        def updated(record) -> None:
            """Where updates are made: on the server, or in the one process."""
            staleness.extend(record.staleness)
            if average is not None and record.clock > marks[-1] / 2:
                average.update_parameters(model)
            if record.clock in marks:
                rmse[record.clock] = root_mean_square_error(average or model, *test)

        strategy = optimizer.strategy
        strategy.on_record = updated
        if not strategy.is_worker:
            strategy.serve(optimizer.update)
            return comm.now()
        worker = comm.rank - (workers > 1)
        drawn = batches(rows_of(worker, workers, settings["own"], len(x)), settings["batch"], settings["seed"], worker)
        for _, chosen in zip(range(marks[-1] // workers), drawn):
            comm.compute()
            optimizer.zero_grad()
            job.loss(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            if workers == 1:
                updated(optimizer.record)
        strategy.pause()
        return comm.now()

    seconds = run_virtual(
        body,
        workers + (workers > 1),
        seed=settings["seed"],
        network=Network(settings["latency_s"], settings["bandwidth_bytes_s"]),
        compute=Jitter(settings["step_s"] + settings["sample_s"] * settings["batch"], settings["jitter"]),
    )
    return {
        "rmse": {str(mark): rmse[mark] for mark in marks},
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        "virtual_s": max(seconds),
        "real_s": time.perf_counter() - started_s,
    }


def rows_of(worker: int, workers: int, own: int, samples: int) -> Tensor:
    """The samples that a worker has for the whole run: all, or a part that no other worker has."""
    return torch.arange(samples) if own == samples else torch.arange(samples).tensor_split(workers)[worker][:own]


def batches(rows: Tensor, batch: int, seed: int, worker: int) -> Iterator[Tensor]:
    """Batches of the same size without end, cut from one permutation of the samples after another."""
    generator = torch.Generator().manual_seed(1000 * (worker + 1) + seed)
    pool = rows[:0]
    while True:
        while len(pool) < batch:
            pool = torch.cat([pool, rows[torch.randperm(len(rows), generator=generator)]])
        yield pool[:batch]
        pool = pool[batch:]


@torch.no_grad()
def root_mean_square_error(model: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    return math.sqrt((model(x) - y).double().square().mean())
