"""Measure the layers of a job's model on a batch of its data, to plan a pipeline or to cut it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hpcdist.comm.communicator import Communicator
from hpcdist.config import JobConfig
from hpcdist.data.hdf5 import HDF5Dataset
from hpcdist.data.loader import Loader
from hpcdist.parallel.cost import LayerCost, measure
from hpcdist.parallel.plan import measured_cut
from hpcdist.train.data import make_data
from hpcdist.train.job import Job

REPEATS = 15


def measure_layers(job: Job, config: JobConfig, device: torch.device) -> list[LayerCost]:
    """Measure each layer of a job's model on its largest micro-batch, on a GPU or with one thread.

    The data file is made if it isn't there.

    Raises:
        ConfigError: the model has no layers in a row.
    """
    samples = -(-config.batch_size // config.parallel.micro_batches)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            make_data(job, Path(config.data.path))
            with HDF5Dataset(Path(config.data.path), "train") as data:
                x, y = next(iter(Loader(data, min(samples, len(data)))))
            torch.manual_seed(config.seed)
            return measure(lambda: job.model(**config.model), x, job.loss, y, repeats=REPEATS, device=device)
    finally:
        torch.set_num_threads(threads)


def with_measured_cut(comm: Communicator, job: Job, config: JobConfig, device: torch.device) -> JobConfig:
    """Collective. Return the settings with numbers of layers in the place of `parallel.cut = "measured"`.

    Args:
        device: on which rank 0 measures.
    """
    chosen = config.parallel
    if not chosen.measures:
        return config
    cut = measured_cut(
        comm, lambda: measure_layers(job, config, device), chosen.stages, schedule=chosen.schedule,
        chunks=chosen.chunks, micro_batches=chosen.micro_batches * config.accumulation, recompute=chosen.recompute,
    )  # fmt: skip
    return config.with_cut(cut.sizes)


def copies(config: JobConfig) -> float:
    """Count the bytes of parameters, gradients and the optimiser's state, after a step, for each byte of parameters."""
    parameter = nn.Parameter(torch.zeros(32, 32))
    parameter.grad = torch.ones_like(parameter)
    optimizer = config.optimizer.build([parameter])
    try:
        optimizer.step(lambda: 0.0)
    except RuntimeError:  # SparseAdam refuses dense gradients
        return 2.0
    state = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return 2.0 + sum(value.numel() for value in state if value.dim()) / parameter.numel()
