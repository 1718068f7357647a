"""Before a run: measure the layers of its model, and set it up on virtual ranks to find errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hpcdist import session, strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.parallel.cost import LayerCost, measure
from hpcdist.parallel.grid import checked_stages
from hpcdist.parallel.plan import measured_cut
from hpcdist.session.misfit import named_misfits
from hpcdist.session.optimizer import release
from hpcdist.train.job import Job, first_batch

REPEATS = 15  # passes to measure a layer
MAX_RANKS = 256  # virtual ranks in a rehearsal: they are threads
WIDTH = 128  # of the model in a rehearsal: enough for a shard of it on each rank


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread within the context, and keep its random state."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(threads)


def measure_layers(job: Job, config: JobConfig, device: torch.device) -> list[LayerCost]:
    """Measure each layer of a job's model on its largest micro-batch, on a GPU or with one thread.

    Creates a missing data file. Raises ConfigError unless the model is a chain of layers.
    """
    samples = -(-config.batch_size // config.parallel.micro_batches)
    with one_thread():
        x, y = first_batch(job, config, samples)
        torch.manual_seed(config.seed)
        with named_misfits(config.data.path, "train", None, x=x, y=y):
            return measure(lambda: job.model(**config.model), x, job.loss, y, repeats=REPEATS, device=device)


def with_measured_cut(comm: Communicator, job: Job, config: JobConfig, device: torch.device) -> JobConfig:
    """Collective. Replace `parallel.cut = "measured"` by numbers of layers; rank 0 measures on `device`."""
    chosen = config.parallel
    if not chosen.measures:
        return config
    cut = measured_cut(
        comm, lambda: measure_layers(job, config, device), chosen.stages, schedule=chosen.schedule,
        chunks=chosen.chunks, micro_batches=chosen.micro_batches * config.accumulation, recompute=chosen.recompute,
    )  # fmt: skip
    return config.with_cut(cut.sizes)


def copies(config: JobConfig) -> float:
    """Return the bytes of parameters, gradients and the optimiser's state per byte of parameters: Adam has 4."""
    parameter = nn.Parameter(torch.zeros(32, 32))
    parameter.grad = torch.ones_like(parameter)
    optimizer = config.optimizer.build([parameter])
    try:
        optimizer.step(lambda: 0.0)
    except RuntimeError:  # SparseAdam refuses dense gradients
        return 2.0
    state = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return 2.0 + sum(value.numel() for value in state if value.dim()) / parameter.numel()


def rehearse(config: JobConfig, ranks: int, ranks_per_node: int = 1) -> None:
    """Create the strategy and the optimiser of a run on virtual ranks, and close them, to find errors before a run.

    A replica of a model in stages counts as one rank. With more than 256 ranks, or an external all-reduce, only the
    roles of the ranks are checked.

    Raises:
        ConfigError: the run would raise it: for too few workers, an unsuitable topology...
    """
    cls = strategies.load(config.strategy.name)
    options = cls.Config.from_mapping(config.strategy.options, "strategy")
    stages = config.parallel.stages
    replicas = ranks // checked_stages(stages, ranks)
    options.workers(replicas)  # raises ConfigError if they are too few
    if replicas > MAX_RANKS or getattr(options, "provider", None):
        return
    network = Network(0.0, math.inf, ranks_per_node=max(1, ranks_per_node // stages))
    run_virtual(lambda comm: _set_up(config, comm), replicas, network=network)


def _set_up(config: JobConfig, comm: Communicator) -> None:
    """Create optimiser and strategy on one virtual rank, for one layer in place of the job's model, and close them."""
    session.init(comm=comm)
    module = nn.Linear(WIDTH, WIDTH)
    optimizer = config.optimizer.build(module.parameters())
    options = {"on_nonfinite": "skip" if config.amp == "fp16" else config.on_nonfinite, **config.strategy.options}
    session.DistributedOptimizer(optimizer, module, config.strategy.name, clip_norm=config.clip_norm, **options)
    release(optimizer)
