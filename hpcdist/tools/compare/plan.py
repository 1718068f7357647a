"""Plans: the cells of an experiment, and the list of its runs.

Pure: nothing is started, read or written.
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

WHOLE = ("parallel.stages=1", "parallel.chunks=1", "parallel.cut=none")  # a model that is in no stages


@dataclass(frozen=True)
class PlannedRun:
    """One run of a plan.

    Attributes:
        name: of its cell, as users read it: runs of one cell differ in their seeds only.
        kind: strategy, serial or baseline.
        overrides: as `--set` takes them: strategy, budget, seed and all that differs from the job's defaults.
        folder: below the plan's.
        cluster: of virtual ranks, as KEY=VALUE, where it is another than the plan's.
        loop: function that trains instead of the job's own training, as path/to/file.py:name. It is called with the
            run's settings, as one table, and its folder; it returns a function of a rank's communicator, collective,
            which leaves in the folder what `hpcdist train` would.
        by_folder: `hpcdist trial` makes it, which finds its settings by its folder: a script's, or a sweep's, whose
            settings are drawn when it begins, and which a pruner may end early.
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
    """The runs of one name on so many ranks, which differ in their seeds.

    Attributes:
        samples: of a step, of all ranks together; 0 where they are unknown.
        settings: of its own, as `--set` takes them.
        stem: the beginning of its folders' names.
        rate_key: by which its learning rate is chosen; cells with the same one share it, on as many ranks.
        cluster, loop: of its runs, see `PlannedRun`.
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
        """Plan its run with a seed, and with a learning rate if that is not the job's own."""
        lr = () if rate is None else (f"optimizer.lr={rate!r}",)
        overrides = (*self._budget(experiment), *experiment.settings, *self.settings, *lr, f"seed={seed}")
        folder = f"{parent}/{self.stem}-r{self.ranks}-s{seed}"
        found = isinstance(experiment, Sweep) or experiment.arguments is not None
        return PlannedRun(self.name, self.kind, self.ranks, seed, overrides, folder, self.cluster, self.loop, found)

    def _budget(self, experiment: Experiment) -> Iterator[str]:
        """Yield the settings that end a run, in place of the job's number of epochs, and those of its curve."""
        budget = experiment.budget
        if budget:
            yield "epochs=none"
            yield from (f"budget.{unit}={limit}" for unit, limit in budget.items())
            samples = budget.get("samples", budget.get("steps", 0) * self.samples)
            if samples and experiment.evaluations:
                yield f"eval_every_samples={max(1, int(samples) // experiment.evaluations)}"


# --- strategies as users write them -----------------------------------------------------------------------------------
def read_strategy(text: str) -> tuple[str, tuple[str, ...]]:
    """Read `NAME:KEY=VALUE,KEY=VALUE`; return the name and the options, each KEY=VALUE."""
    head, equals, _ = text.partition("=")
    if not equals:
        return text.rstrip(":"), ()
    name, _, key = head.rpartition(":")
    return name, tuple(COMMAS.split(key + text[len(head) :]))


def title(strategy: str) -> str:
    """Name a strategy as users read it: `softsync (splits 4)`."""
    name, options = read_strategy(strategy)
    told = ", ".join(option.replace("=", " ", 1) for option in options)
    return f"{label(name)} ({told})" if told else label(name)


# --- the cells and the runs of an experiment --------------------------------------------------------------------------
def groups(
    experiment: Comparison | Sweep, batch_size: int = 1, accumulation: int = 1, stages: int = 1
) -> list[ComparedGroup]:
    """List all cells: each strategy and baseline on each number of ranks, and serial controls for each above 1.

    Those of a sweep are its trials, before their settings are drawn.

    Controls are one process with as large a batch as all replicas have together, μp, and the same with the average of
    its iterates: most that p replicas gain or lose is due to the one or to the other.

    Args:
        batch_size: μ, of each replica of the model.
        accumulation: batches of a step of each replica.
        stages: ranks of a replica.
    """
    if isinstance(experiment, Sweep):
        return [trial_group(experiment, number) for number in range(len(points(experiment)))]
    found, whole = [], WHOLE if stages > 1 else ()
    for ranks in experiment.ranks:
        samples = batch_size * accumulation * max(1, ranks // stages)
        for strategy in experiment.strategies:
            name, options = read_strategy(strategy)
            settings = (f"strategy={name}", *(f"strategy.{option}" for option in options))
            stem = file_name("-".join([label(name), *options]))
            found.append(ComparedGroup(title(strategy), "strategy", ranks, samples, settings, stem, strategy))
        for baseline in experiment.baselines:
            found.append(ComparedGroup(baseline, "baseline", ranks, samples, (), baseline, baseline))
    if experiment.virtual is not None and experiment.controls and 1 not in experiment.ranks:  # what speed-ups are over
        samples, settings = batch_size * accumulation, ("strategy=allreduce", *whole)
        found.append(ComparedGroup("one rank", "serial", 1, samples, settings, "serial", "serial"))
    controlled = experiment.controls and experiment.arguments is None  # nobody else knows a script's batch
    for replicas in sorted({max(1, ranks // stages) for ranks in experiment.ranks if ranks > 1 and controlled}):
        batch, samples = batch_size * replicas, batch_size * accumulation * replicas
        settings, stem = ("strategy=allreduce", f"batch_size={batch}", *whole), f"serial-batch={batch}"
        key = f"serial, batch {batch}"
        found.append(ComparedGroup(key, "serial", 1, samples, settings, stem, key))
        averaged = (*settings, "average_iterates=true")
        found.append(
            ComparedGroup(f"{key}, averaged iterates", "serial", 1, samples, averaged, f"{stem}-averaged", key)
        )
    return found


def trial_group(sweep: Sweep, number: int, settings: Sequence[str] = ()) -> ComparedGroup:
    """Return the cell of a sweep's trial, with the settings that were drawn for it, each KEY=VALUE; none before that.

    The samples of its step are unknown.
    """
    name, options = read_strategy(sweep.strategy)
    own = (f"strategy={name}", *(f"strategy.{option}" for option in options), *settings)
    named = ", ".join(settings) or f"trial {number}"
    return ComparedGroup(named, "strategy", sweep.ranks, 0, own, f"trial-{number:03}")


def plan(
    experiment: Experiment, kept: Sequence[ComparedGroup], rates: Mapping[tuple[str, int], float] | None = None
) -> tuple[PlannedRun, ...]:
    """List the runs in the order in which they are made: those of a sweep trial by trial, others seed by seed.

    The cells of each seed are in random order. Changes on the machine in the course of hours then strike all cells
    alike, and a comparison that ends early has whole seeds.

    Args:
        kept: cells that can run.
        rates: learning rates by key and ranks, where they are not the job's own.

    Raises:
        ConfigError: two strategies are the same.
    """
    seeds = range(experiment.seeds)
    if isinstance(experiment, Sweep):
        return tuple(group.run(experiment, seed) for group in kept for seed in seeds)
    chosen, shuffled = rates or {}, random.Random(0)
    order: list[PlannedRun] = []
    for seed in seeds:
        of_seed = [group.run(experiment, seed, chosen.get((group.rate_key, group.ranks))) for group in kept]
        shuffled.shuffle(of_seed)
        order += of_seed
    told = [(run.folder, run.name) for run in order]  # on one rank strategies may share runs
    if twice := next((folder for folder, name in told if told.count((folder, name)) > 1), None):
        raise ConfigError(f"--strategies must differ from each other; got two for {twice}. Remove one of them.")
    return tuple(order)


def mean_metric(found: Sequence[Summary | None], metric: str) -> float | None:
    """Average a metric over runs; None where one failed, or ended with a NaN."""
    values = [math.nan if one is None else one.metrics.get(metric, math.nan) for one in found]
    return fmean(values) if all(map(math.isfinite, values)) else None


def file_name(text: str) -> str:
    """Make the beginning of folders' names of a cell's name."""
    return re.sub(r"[^\w.=+-]+", "_", text)[:100]
