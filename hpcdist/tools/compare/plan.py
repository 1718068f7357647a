"""Plans of runs: what all runs of one folder share, its cells, and the list of its runs.

Pure: nothing is started, read or written.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval  # pydantic reads it; the command line must not load pydantic itself

from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.registry import label

if TYPE_CHECKING:
    from hpcdist.records import Summary

WHOLE = ("parallel.stages=1", "parallel.chunks=1", "parallel.cut=none")  # a model that is in no stages
MOST = 100_000  # trials or seeds of a declaration that is read from a file
BUDGETS = ("samples", "steps", "seconds")
COMMAS = re.compile(r",(?![^\[{]*[\]}])")  # that are in no brackets
_OPTION = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*=")


# --- runs and their declaration ---------------------------------------------------------------------------------------
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
        judged: it is a sweep's, whose settings are drawn when it begins, and which a pruner may end early.
    """

    name: str
    kind: str
    ranks: int
    seed: int
    overrides: tuple[str, ...]
    folder: str
    cluster: tuple[str, ...] = ()
    loop: str = ""
    judged: bool = False


@dataclass(frozen=True, kw_only=True)
class RunDeclaration:
    """The declaration of a comparison, a sweep or a study, as far as all of its runs share it.

    Attributes:
        job: the job's file.
        job_sha256: of its content.
        metric: of the job, by which runs are judged.
        target: the metric's value to reach; None for none.
        budget: `samples`, `steps` or `seconds` of each run; empty for the job's epochs.
        evaluations: of each run within its budget of samples or steps; 0 for those at the ends of epochs alone.
        settings: of every run, as `--set` takes them.
        seeds: runs of each cell: with the seeds 0, 1...
        threads: of each rank.
        virtual: cluster of virtual ranks; None for real ones.
    """

    job: str
    job_sha256: str = ""
    metric: str
    target: float | None = None
    budget: Mapping[str, int | float] = field(default_factory=dict)
    evaluations: int = 0
    settings: tuple[str, ...] = ()
    seeds: Annotated[int, Interval(ge=1, le=MOST)] = 1
    threads: int = 1
    virtual: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Declaration(RunDeclaration):
    """A comparison as the user asks for it. Another one is refused in the same folder.

    Attributes:
        strategies: each `NAME` or `NAME:KEY=VALUE,KEY=VALUE`.
        ranks: numbers of them.
        baselines: other libraries' training, see `hpcdist/tools/baselines`.
        rates: learning rates that the user has chosen, by strategy as it stands in `strategies`.
        tune: runs in which each cell searches its learning rate; 0 takes the job's, or the user's.
        controls: add serial runs.
    """

    strategies: tuple[str, ...]
    ranks: tuple[int, ...]
    baselines: tuple[str, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    tune: int = 0
    controls: bool = True


@dataclass(frozen=True, kw_only=True)
class SweepDeclaration(RunDeclaration):
    """A sweep as the user asks for it.

    Attributes:
        strategy: of all runs, `NAME` or `NAME:KEY=VALUE,KEY=VALUE`.
        over: settings and their values, each `KEY=A,B,C` or `KEY=LOW..HIGH`, with `:log` and `:POINTS` behind it.
        trials: combinations that are tried; a grid has all.
        ranks: of each run.
        sampler: tpe, random or grid.
        pruner: asha, median or none.
    """

    strategy: str
    over: tuple[str, ...]
    trials: Annotated[int, Interval(ge=1, le=MOST)]
    ranks: int
    sampler: str = "tpe"
    pruner: str = "none"


@dataclass(frozen=True)
class ComparedCell:
    """The runs of one name on so many ranks, which differ in their seeds.

    Attributes:
        samples: of a step, of all ranks together.
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

    def run(self, declared: RunDeclaration, seed: int, rate: float | None = None, parent: str = "runs") -> PlannedRun:
        """Plan its run with a seed, and with a learning rate if that is not the job's own."""
        lr = () if rate is None else (f"optimizer.lr={rate!r}",)
        overrides = (*self._budget(declared), *declared.settings, *self.settings, *lr, f"seed={seed}")
        folder = f"{parent}/{self.stem}-r{self.ranks}-s{seed}"
        return PlannedRun(self.name, self.kind, self.ranks, seed, overrides, folder, self.cluster, self.loop)

    def _budget(self, declared: RunDeclaration) -> Iterator[str]:
        """Yield the settings that end a run, in place of the job's number of epochs, and those of its curve."""
        budget = declared.budget
        if budget:
            yield "epochs=none"
            yield from (f"budget.{unit}={limit}" for unit, limit in budget.items())
            samples = budget.get("samples", budget.get("steps", 0) * self.samples)
            if samples and declared.evaluations:
                yield f"eval_every_samples={max(1, int(samples) // declared.evaluations)}"


# --- strategies as users write them -----------------------------------------------------------------------------------
def split_strategies(text: str) -> list[str]:
    """Split `a,b:key=value,key=value,c` at the commas between strategies: an item `key=value` is the former one's.

    Raises:
        ConfigError: an option stands before any strategy, or a name is empty.
    """
    found: list[str] = []
    for item in map(str.strip, COMMAS.split(text)):
        if _OPTION.match(item):
            if not found or "=" not in found[-1]:
                raise ConfigError(
                    f"--strategies must be names, each with options as NAME:KEY=VALUE,KEY=VALUE; got {item!r} "
                    f"{f'after {found[-1]}' if found else 'first'}. Put a colon between a name and its first option."
                )
            found[-1] += f",{item}"
        elif not item:
            raise ConfigError(f"--strategies must be names between commas; got {text!r}. Remove the empty one.")
        else:
            found.append(item)
    return found


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


# --- the cells and the runs of a comparison ---------------------------------------------------------------------------
def cells(declared: Declaration, batch_size: int, accumulation: int = 1, stages: int = 1) -> list[ComparedCell]:
    """List all cells: each strategy and baseline on each number of ranks, and serial controls for each above 1.

    Controls are one process with as large a batch as all replicas have together, μp, and the same with the average of
    its iterates: most that p replicas gain or lose is due to the one or to the other.

    Args:
        batch_size: μ, of each replica of the model.
        accumulation: batches of a step of each replica.
        stages: ranks of a replica.
    """
    found, whole = [], WHOLE if stages > 1 else ()
    for ranks in declared.ranks:
        samples = batch_size * accumulation * max(1, ranks // stages)
        for strategy in declared.strategies:
            name, options = read_strategy(strategy)
            settings = (f"strategy={name}", *(f"strategy.{option}" for option in options))
            stem = file_name("-".join([label(name), *options]))
            found.append(ComparedCell(title(strategy), "strategy", ranks, samples, settings, stem, strategy))
        for baseline in declared.baselines:
            found.append(ComparedCell(baseline, "baseline", ranks, samples, (), baseline, baseline))
    if declared.virtual is not None and declared.controls and 1 not in declared.ranks:  # what speed-ups are over
        samples, settings = batch_size * accumulation, ("strategy=allreduce", *whole)
        found.append(ComparedCell("one rank", "serial", 1, samples, settings, "serial", "serial"))
    for replicas in sorted({max(1, ranks // stages) for ranks in declared.ranks if ranks > 1 and declared.controls}):
        batch, samples = batch_size * replicas, batch_size * accumulation * replicas
        settings, stem = ("strategy=allreduce", f"batch_size={batch}", *whole), f"serial-batch={batch}"
        key = f"serial, batch {batch}"
        found.append(ComparedCell(key, "serial", 1, samples, settings, stem, key))
        averaged = (*settings, "average_iterates=true")
        found.append(ComparedCell(f"{key}, averaged iterates", "serial", 1, samples, averaged, f"{stem}-averaged", key))
    return found


def runs(
    declared: Declaration, kept: Sequence[ComparedCell], rates: Mapping[tuple[str, int], float | None] | None = None
) -> list[PlannedRun]:
    """List the runs in the order in which they are made: seed by seed, the cells of each in random order.

    Changes on the machine in the course of hours then strike all cells alike, and a comparison that ends early has
    whole seeds.

    Args:
        rates: learning rates by key and ranks, where they are not the job's own.
    """
    chosen, shuffled = rates or {}, random.Random(0)
    order = []
    for seed in range(declared.seeds):
        of_seed = [cell.run(declared, seed, chosen.get((cell.rate_key, cell.ranks))) for cell in kept]
        shuffled.shuffle(of_seed)
        order += of_seed
    folders = [run.folder for run in order]
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise ConfigError(f"--strategies must differ from each other; got two for {twice}. Remove one of them.")
    return order


def read_budget(items: Sequence[str]) -> dict[str, float]:
    """Read a budget: each item UNIT=NUMBER, or several with commas between them.

    Raises:
        ConfigError: a unit is unknown, or a number is none or not above 0.
    """
    budget: dict[str, float] = {}
    for item in ",".join(items).split(",") if items else ():
        unit, _, number = item.strip().partition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        if unit not in BUDGETS or not 0 < limit < float("inf"):
            raise ConfigError(f"--budget must be samples=N, steps=N or seconds=N, with N above 0; got {item!r}.")
        budget[unit] = limit if unit == "seconds" else int(limit)
    return budget


def higher_is_better(metrics: Mapping[str, Any], metric: str) -> bool:
    """Tell whether more of a job's metric is better; raise UnknownNameError where it has none of that name."""
    if metric == "loss":
        return False
    if metric not in metrics:
        raise UnknownNameError("metric", metric, [*metrics, "loss"])
    return metrics[metric].higher_is_better


def mean_metric(found: Sequence[Summary | None], metric: str) -> float | None:
    """Average a metric over runs; None where one failed, or ended with a NaN."""
    values = [math.nan if one is None else one.metrics[metric] for one in found]
    return fmean(values) if all(map(math.isfinite, values)) else None


def file_name(text: str) -> str:
    """Make the beginning of folders' names of a cell's name."""
    return re.sub(r"[^\w.=+-]+", "_", text)[:100]
