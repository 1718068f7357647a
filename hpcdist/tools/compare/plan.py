"""Plan an experiment: its groups of runs, and the order of the runs. Nothing is started, read or written here.

An experiment is a comparison or a sweep. A run trains once, with one seed; a group has the runs that differ in their
seeds only: of a strategy on a number of ranks, of a serial control, or of a sweep's trial.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hpcdist.errors import ConfigError
from hpcdist.records import Summary
from hpcdist.registry import label
from hpcdist.tools.compare.experiment import COMMAS, Comparison, Experiment, Sweep
from hpcdist.tools.compare.space import points

WHOLE = ("parallel.stages=1", "parallel.chunks=1", "parallel.cut=none")  # the whole model on one rank


@dataclass(frozen=True)
class PlannedRun:
    """One run of a plan.

    Attributes:
        name: display name of the group, whose runs differ in their seeds only.
        kind: strategy, serial or baseline.
        overrides: KEY=VALUE settings, as for `--set`: strategy, budget, seed and all other differences from the job.
        folder: path relative to the experiment's folder.
        cluster: KEY=VALUE changes to the cluster of virtual ranks.
        loop: function that trains instead of the job's own training, as path/to/file.py:name. It is called with the
            run's settings (one nested dict) and folder, and returns a function of a rank's communicator. That function
            trains on all ranks and writes the same files as `hpcdist train`.
        by_folder: `hpcdist trial` runs it and reads the settings from the experiment's folder: for scripts, and for
            sweeps, whose settings are sampled when the run starts.
    """

    name: str
    kind: str
    ranks: int
    seed: int
    overrides: tuple[str, ...]
    folder: str
    cluster: tuple[str, ...] = ()
    loop: str = ""
    by_folder: bool = False


@dataclass(frozen=True)
class ComparedGroup:
    """A group of runs with one name and number of ranks; its runs differ in their seeds only.

    Attributes:
        samples: samples of a step, summed over all ranks; 0: unknown.
        settings: KEY=VALUE settings of this group, as for `--set`.
        stem: prefix of its folders' names.
        rate_key: key of its learning rate; groups with the same key and number of ranks share a rate.
        cluster, loop: see `PlannedRun`.
    """

    name: str
    kind: str
    ranks: int
    samples: int
    settings: tuple[str, ...]
    stem: str
    rate_key: str = ""
    cluster: tuple[str, ...] = ()
    loop: str = ""

    def run(self, experiment: Experiment, seed: int, rate: float | None = None, parent: str = "runs") -> PlannedRun:
        """Plan the run with a seed, in the folder `parent`; `rate` replaces the job's learning rate."""
        lr = () if rate is None else (f"optimizer.lr={rate!r}",)
        overrides = (*self._budget(experiment), *experiment.settings, *self.settings, *lr, f"seed={seed}")
        folder = f"{parent}/{self.stem}-r{self.ranks}-s{seed}"
        by_folder = isinstance(experiment, Sweep) or experiment.arguments is not None
        return PlannedRun(self.name, self.kind, self.ranks, seed, overrides, folder, self.cluster, self.loop, by_folder)

    def _budget(self, experiment: Experiment) -> Iterator[str]:
        """Yield the settings that end a run by its budget, and the interval between evaluations."""
        budget = experiment.budget
        if budget:
            yield "epochs=none"
            yield from (f"budget.{unit}={limit}" for unit, limit in budget.items())
            samples = budget.get("samples", budget.get("steps", 0) * self.samples)
            if samples and experiment.evaluations:
                yield f"eval_every_samples={max(1, int(samples) // experiment.evaluations)}"


# --- strategies as users write them -----------------------------------------------------------------------------------
def read_strategy(text: str) -> tuple[str, tuple[str, ...]]:
    """Split `NAME:KEY=VALUE,KEY=VALUE` into the name and the KEY=VALUE options."""
    name_and_key, equals, _ = text.partition("=")
    if not equals:
        return text.rstrip(":"), ()
    name, _, key = name_and_key.rpartition(":")
    return name, tuple(COMMAS.split(key + text[len(name_and_key) :]))


def title(strategy: str) -> str:
    """Format a strategy for people: `softsync (splits 4)`."""
    name, options = read_strategy(strategy)
    text = ", ".join(option.replace("=", " ", 1) for option in options)
    return f"{label(name)} ({text})" if text else label(name)


# --- groups and runs of an experiment ---------------------------------------------------------------------------------
def groups(
    experiment: Comparison | Sweep, batch_size: int = 1, accumulation: int = 1, stages: int = 1
) -> list[ComparedGroup]:
    """List all groups: each strategy and baseline on each number of ranks, and serial controls; of a sweep, its trials.

    A serial control trains one process with the batch of all p replicas, μp; a second one also averages its iterates.
    Most of what p replicas gain or lose comes from the large batch or from the averaging.

    Args:
        batch_size: μ, batch of each replica of the model.
        accumulation: batches per step of each replica.
        stages: ranks per replica.
    """
    if isinstance(experiment, Sweep):
        return [trial_group(experiment, number) for number in range(len(points(experiment)))]
    result, whole_model = [], WHOLE if stages > 1 else ()  # settings of runs on one rank
    for ranks in experiment.ranks:
        samples = batch_size * accumulation * max(1, ranks // stages)
        for strategy in experiment.strategies:
            name, options = read_strategy(strategy)
            settings = (f"strategy={name}", *(f"strategy.{option}" for option in options))
            stem = file_name("-".join([label(name), *options]))
            result.append(ComparedGroup(title(strategy), "strategy", ranks, samples, settings, stem, strategy))
        for baseline in experiment.baselines:
            result.append(ComparedGroup(baseline, "baseline", ranks, samples, (), file_name(label(baseline)), baseline))
    if experiment.virtual is not None and experiment.controls and 1 not in experiment.ranks:  # reference for speedups
        samples, settings = batch_size * accumulation, ("strategy=allreduce", *whole_model)
        result.append(ComparedGroup("one rank", "serial", 1, samples, settings, "serial", "serial"))
    has_controls = experiment.controls and experiment.arguments is None  # the batch of a script is unknown
    for replicas in sorted({max(1, ranks // stages) for ranks in experiment.ranks if ranks > 1 and has_controls}):
        batch, samples = batch_size * replicas, batch_size * accumulation * replicas
        settings, stem = ("strategy=allreduce", f"batch_size={batch}", *whole_model), f"serial-batch={batch}"
        key = f"serial, batch {batch}"
        result.append(ComparedGroup(key, "serial", 1, samples, settings, stem, key))
        averaged = (*settings, "average_iterates=true")
        result.append(
            ComparedGroup(f"{key}, averaged iterates", "serial", 1, samples, averaged, f"{stem}-averaged", key)
        )
    return result


def trial_group(sweep: Sweep, number: int, settings: Sequence[str] = ()) -> ComparedGroup:
    """Return the group of a sweep's trial; `settings` are the sampled KEY=VALUE, empty before they are sampled."""
    name, options = read_strategy(sweep.strategy)
    all_settings = (f"strategy={name}", *(f"strategy.{option}" for option in options), *settings)
    group_name = ", ".join(settings) or f"trial {number}"
    return ComparedGroup(group_name, "strategy", sweep.ranks, 0, all_settings, f"trial-{number:03}")


def plan(
    experiment: Experiment, runnable: Sequence[ComparedGroup], rates: Mapping[tuple[str, int], float] | None = None
) -> tuple[PlannedRun, ...]:
    """List the runs in the order in which they run: a sweep trial by trial, a comparison seed by seed.

    Within a seed the groups are in random order: slow drifts of the machine's speed then affect all groups equally, and
    a comparison that is interrupted has complete seeds.

    Args:
        runnable: groups that can run.
        rates: learning rates by (rate_key, ranks), where they differ from the job's.

    Raises:
        ConfigError: two strategies are identical.
    """
    seeds = range(experiment.seeds)
    if isinstance(experiment, Sweep):
        return tuple(group.run(experiment, seed) for group in runnable for seed in seeds)
    rate_by_key, rng = rates or {}, random.Random(0)  # the same order each time
    order: list[PlannedRun] = []
    for seed in seeds:
        of_seed = [group.run(experiment, seed, rate_by_key.get((group.rate_key, group.ranks))) for group in runnable]
        rng.shuffle(of_seed)
        order += of_seed
    pairs = [(run.folder, run.name) for run in order]  # on one rank strategies may share runs
    if duplicate := next((folder for folder, name in pairs if pairs.count((folder, name)) > 1), None):
        raise ConfigError(f"--strategies must differ from each other; got two for {duplicate}. Remove one of them.")
    return tuple(order)


def mean_metric(summaries: Sequence[Summary | None], metric: str) -> float | None:
    """Average a metric over runs; None if a run failed (None) or its metric is NaN or infinite."""
    values = [math.nan if summary is None else summary.metrics.get(metric, math.nan) for summary in summaries]
    return fmean(values) if all(map(math.isfinite, values)) else None


def file_name(text: str) -> str:
    """Turn a group's name into a prefix of folder names."""
    return re.sub(r"[^\w.=+-]+", "_", text)[:100]
