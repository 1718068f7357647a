"""The virtual cluster of an experiment; measure a job's step on this machine, with one thread."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from hpcdist.config.files import neighbours
from hpcdist.config.job import JobConfig
from hpcdist.errors import ConfigError
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.folder import read
from hpcdist.tools.simulate.cluster import MEASURED, ClusterConfig
from hpcdist.train import Job
from hpcdist.train.job import first_batch, prepare_data
from hpcdist.train.loop import local_device
from hpcdist.train.planning import one_thread
from hpcdist.train.runs import specify

WARM_UP, STEPS = 2, 7
E = TypeVar("E", bound=Comparison | Sweep)


@one_thread()
def measure_step(job: Job, config: JobConfig, samples: int) -> float:
    """Return the median seconds of a few steps with this number of samples: forward, backward, optimizer.

    If the data set has fewer samples, the time is scaled in proportion.
    """
    device = local_device(0)
    torch.manual_seed(config.seed)
    module = job.model(**config.model).to(device)
    optimizer: Any = config.optimizer.build(module.parameters())
    x, y = (tensor.to(device) for tensor in first_batch(job, config, samples))
    # With gradient accumulation a step has several backward passes.
    parts = list(zip(x.split(config.batch_size), y.split(config.batch_size), strict=True))

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        losses = []
        for x_part, y_part in parts if config.accumulation > 1 else [(x, y)]:
            loss = job.loss(module(x_part), y_part) * (len(x_part) / len(x))
            loss.backward()
            losses.append(loss.detach())
        return sum(losses, torch.zeros(()).to(device))

    times = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        optimizer.step(evaluate).item()
        times.append(time.perf_counter() - start)
    return median(times[WARM_UP:]) * samples / len(x)


def on_cluster(experiment: E, cluster: ClusterConfig, output: Path) -> E:
    """Return the experiment with `virtual`: the cluster, a step's `samples`, and `step_s`, measured once per folder.

    `Simulation` describes the last two. Creates the job's data file if it is missing, since concurrent processes can't.

    Raises:
        ConfigError: a setting is wrong, or the compute model does not suit the number of ranks.
    """
    if experiment.arguments is not None:
        if MEASURED in cluster.compute:
            raise ConfigError(
                f"--compute must be a time with a script, whose step can't be measured before a run; got "
                f"{cluster.compute}. Write --compute 20ms, or --compute replay:RUN, a run of the script."
            )
        cluster.steps(lambda given_s: given_s or 0.0).check(experiment.max_ranks)
        return replace(experiment, virtual={**cluster.model_dump(), "samples": 0, "step_s": {}})
    job_path = Path(experiment.job)
    with neighbours(job_path):
        job, config = specify(job_path, None, experiment.settings)
        prepare_data(job, config)
        step_samples = config.batch_size * config.accumulation
        cluster.steps(lambda given_s: given_s or 1.0).check(experiment.max_ranks)
        described = {**cluster.model_dump(), "samples": step_samples}
        stored = (read(output) or {}).get("virtual") or {}  # of an existing simulation in the folder
        if MEASURED in cluster.compute and described.items() <= stored.items():
            return replace(experiment, virtual={**described, "step_s": stored["step_s"]})
        sizes = {step_samples} if MEASURED in cluster.compute else set()
        if sizes and isinstance(experiment, Comparison) and experiment.controls:  # with the batch of all replicas
            sizes |= {step_samples * max(1, ranks // config.parallel.stages) for ranks in experiment.ranks}
        step_s = {str(size): float(f"{measure_step(job, config, size):.3g}") for size in sorted(sizes)}
    return replace(experiment, virtual={**described, "step_s": step_s})
