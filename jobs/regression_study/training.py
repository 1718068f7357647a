"""One run on virtual ranks: of a protocol, in a user's own loop, or of the job as it is."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

import hpcdist as hd
from hpcdist.comm.virtual import Jitter, Network, run_virtual
from hpcdist.config import JobConfig
from hpcdist.data import HDF5Dataset
from hpcdist.train import Trainer, load_job

JOB = Path(__file__).parents[1] / "regression.py"


def train(data: Path, settings: dict) -> dict:
    """One run: of the job as it is, whose settings name a strategy, or of a protocol."""
    started_s = time.perf_counter()
    measured = (train_job if "strategy" in settings else train_protocol)(data, settings)
    return {**measured, "real_s": time.perf_counter() - started_s}


def train_protocol(data: Path, settings: dict) -> dict:
    """Trains with plain SGD of constant rate; looks at the test set after every so many updates.

    The initialisation depends on the seed alone, the order of the samples on seed and worker.
    """
    job = load_job(JOB)
    splits = {name: HDF5Dataset(data, name) for name in ("train", "test")}
    (x, y), test = (split.batch(range(len(split))) for split in splits.values())
    workers, updates = settings["workers"], settings["updates"]
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
            if average is not None and record.clock > updates / 2:
                average.update_parameters(model)
            if record.clock % settings["every"] == 0:
                rmse[record.clock] = root_mean_square_error(average or model, *test)

        strategy = optimizer.strategy
        strategy.on_record = updated
        if not strategy.is_worker:
            strategy.serve(optimizer.update)
            return comm.now()
        worker = comm.rank - (workers > 1)
        drawn = batches(rows_of(worker, workers, settings["own"], len(x)), settings["batch"], settings["seed"], worker)
        for _, chosen in zip(range(updates // workers), drawn):
            comm.compute()
            optimizer.zero_grad()
            job.loss(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            if workers == 1:
                updated(optimizer.record)
        strategy.pause()
        return comm.now()

    seconds = run_virtual(body, workers + (workers > 1), seed=settings["seed"], **_cluster(settings))
    return {
        "rmse": {str(clock): value for clock, value in rmse.items()},
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        "virtual_s": max(seconds),
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


def train_job(data: Path, settings: dict) -> dict:
    """A run of the job with its own defaults, as `hpcdist train` makes it."""
    job = load_job(JOB)
    chosen = {key: settings[key] for key in ("strategy", "epochs", "seed")}
    chosen |= {"batch_size": settings["batch"], "eval_every": settings["epochs"], "data": {"path": str(data)}}
    config = JobConfig(**{**job.defaults, **chosen})
    with tempfile.TemporaryDirectory() as folder:

        def body(comm):
            trainer = Trainer(job, config, comm, Path(folder), None)
            summary = trainer.run()
            trainer.close()
            return summary

        summary, *_ = run_virtual(body, settings["ranks"], seed=settings["seed"], **_cluster(settings))
    return {"rmse": summary.metrics["rmse"]}


def _cluster(settings: dict) -> dict:
    batch = settings["batch"]
    return {
        "network": Network(settings["latency_s"], settings["bandwidth_bytes_s"]),
        "compute": Jitter(settings["step_s"] + settings["sample_s"] * batch, settings["jitter"]),
    }
