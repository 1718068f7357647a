"""Experiments as values: a comparison of strategies, or a sweep over settings; and options for how to run them.

Each field is an option of `hpcdist compare|simulate|sweep`, an argument of the Python function of the same name, and a
key of `declared` in `comparison.json`. The field's annotation holds an `Option` (help text) and a `Reader` (parser).
The command line reads these annotations at start, so this module must not import pydantic, which is slow; pydantic
checks the types when a file is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

from annotated_types import Interval
from typer import Option

from hpcdist.errors import ConfigError, DataError, UnknownNameError
from hpcdist.tools import completion
from hpcdist.tools.options import Launcher, option, read_counts, read_number, read_target
from hpcdist.tools.slurm.places import sites

E = TypeVar("E", bound="Experiment")
COUNT = Interval(ge=1, le=100_000)  # limit for values read from files
ANY = Interval(ge=0)
UNITS = ("samples", "steps", "seconds")
BUDGET = "samples=N, steps=N or seconds=N, with N above 0"
COMMAS = re.compile(r",(?![^\[{]*[\]}])")  # commas outside of brackets
_OPTION = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*=")


# --- parsers of options -----------------------------------------------------------------------------------------------
class Reader(NamedTuple):
    """Parser of a field: from the option's texts, or from a Python value."""

    read: Callable[[Any], Any]


def read_budget(value: Mapping[str, float] | Sequence[str]) -> dict[str, float]:
    """Parse a budget: a dict of numbers by unit, or texts such as `samples=20000,seconds=60`.

    Raises:
        ConfigError: unknown unit, or the number is not above 0.
    """
    items = [f"{unit}={limit}" for unit, limit in value.items()] if isinstance(value, Mapping) else value
    budget: dict[str, float] = {}
    for item in ",".join(map(str, items)).split(",") if items else ():
        unit, limit = read_number("--budget", BUDGET, "samples=20000", item.strip())
        if unit not in UNITS or not 0 < limit < float("inf"):
            raise ConfigError(f"--budget must be {BUDGET}; got {item!r}.")
        budget[unit] = limit if unit == "seconds" else int(limit)
    return budget


def read_strategies(texts: Sequence[str]) -> tuple[str, ...]:
    """Split `a,b:key=value,key=value,c` into strategies; an item `key=value` belongs to the strategy before it.

    Raises:
        ConfigError: an item does not follow a strategy with a colon and an option, or a name is empty.
    """
    parsed: list[str] = []
    for item in map(str.strip, COMMAS.split(text := ",".join(texts))):
        if _OPTION.match(item):
            if not parsed or "=" not in parsed[-1]:  # no first option, which stands behind the name's colon
                raise ConfigError(
                    f"--strategies must be names, each with options as NAME:KEY=VALUE,KEY=VALUE; got {item!r} "
                    f"{f'after {parsed[-1]}' if parsed else 'first'}. Put a colon between a name and its first option."
                )
            parsed[-1] += f",{item}"
        elif not item:
            raise ConfigError(f"--strategies must be names between commas; got {text!r}. Remove the empty one.")
        else:
            parsed.append(item)
    return tuple(parsed)


def _read_ranks(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(read_counts("--ranks", ",".join(map(str, values)))))


def _read_rates(value: Mapping[str, float] | Sequence[str]) -> dict[str, float]:
    return dict(
        value.items()
        if isinstance(value, Mapping)
        else (read_number("--rate", "STRATEGY=RATE", "allreduce=0.01", item) for item in value)
    )


def _read_over(value: Mapping[str, str | Sequence[object]] | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(value, Mapping):
        return tuple(value)
    return tuple(f"{key}={v if isinstance(v, str) else ','.join(map(str, v))}" for key, v in value.items())


# --- experiments ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Settings that all runs of a comparison, a sweep or a study share. One folder holds one experiment.

    Attributes:
        job: path of the job's file or of a script with its own training loop; or a function, as path/to/file.py:name.
        job_sha256: hash of the file.
        arguments: command-line arguments of the script; None for a job.
        metric: metric of the job that ranks the runs; empty: the first metric that a script logs.
        target: value of the metric to reach; None: no target.
        settings: KEY=VALUE settings of every run, as for `--set`.
        virtual: cluster description for virtual ranks; None: real ranks.
    """

    job: str
    job_sha256: str = ""
    arguments: tuple[str, ...] | None = None
    metric: str
    target: float | None = None
    budget: Annotated[
        Mapping[str, int | float],
        option("UNIT=N", "When each run ends: samples=N (of all ranks), steps=N or seconds=N."),
        Reader(read_budget),
    ] = field(default_factory=dict)
    evaluations: Annotated[
        int, Option(help="Evaluations of a run with a budget of samples or steps. 0: after epochs only."), ANY
    ] = 20
    settings: tuple[str, ...] = ()
    seeds: Annotated[int, COUNT] = 1
    threads: Annotated[int, Option(help="Threads of each process."), COUNT] = 1
    virtual: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls: type[E],
        job: str | Path | Callable[..., Any],
        *,
        target: str | tuple[str, float] | None = None,
        arguments: Sequence[str] | None = None,
        config: str | Path | None = None,
        settings: Sequence[str] | None = None,
        **options: Any,
    ) -> E:
        """Create an experiment from options as users give them: texts of the command line, or Python values.

        Args:
            job: path of a Python file that defines `job`, or of a script with its own training loop; or a function with
                such a loop, which the ranks import from its file.
            target: a metric and the value to reach; None: the job's first metric, without a target.
            arguments: command-line arguments of a script.
            config: TOML file of settings.
            settings: KEY=VALUE settings of all runs; they override the file.
            options: the other fields; None or an empty list means the default.

        Raises:
            ConfigError: `job` is no path or function, or a setting is unknown, of a wrong type or out of bounds.
        """
        from hpcdist.config.merge import as_flags, load
        from hpcdist.records.files import checked
        from hpcdist.tools.compare.script import read_job
        from hpcdist.tools.report.results import refuse_percent
        from hpcdist.train import load_job

        hints = get_type_hints(cls, include_extras=True)
        reference, file, script_arguments, takes_seed = read_job(job, arguments)
        if not takes_seed and options.get("seeds") is None:
            options["seeds"] = 1  # the script could not use others
        options = {name: value for name, value in options.items() if value is not None and value != []}
        for name in options.keys() - hints.keys():
            raise UnknownNameError(
                "arguments", name, hints.keys() - {"job_sha256", "metric"} | {"config", *get_type_hints(Execution)}
            )
        for name in options.keys() & hints.keys():
            for reader in (item for item in get_args(hints[name]) if isinstance(item, Reader)):
                value = options[name]  # from Python: also a text or a number, for a list of one
                options[name] = reader.read([value] if isinstance(value, str | int) else value)
        target = read_target(target) if isinstance(target, str) else target
        metrics = load_job(file).metrics if script_arguments is None else {}
        if target is not None:
            metric, value = target
            if metric in metrics:
                refuse_percent(metric, value, [metrics[metric].finish(1.0)])
        else:
            metric, value = next(iter(metrics), "loss") if script_arguments is None else "", None
        experiment = cls(
            job=reference,
            arguments=script_arguments,
            job_sha256=hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
            metric=metric,
            target=value,
            settings=tuple(as_flags(load({}, None if config is None else Path(config), settings or ()))),
            **options,
        )
        try:
            checked(asdict(experiment), cls, f"options of {cls.__name__}", "be of their types, within bounds")
        except DataError as error:
            raise ConfigError(str(error)) from None
        return experiment


@dataclass(frozen=True, kw_only=True)
class Comparison(Experiment):
    """A comparison of strategies, each on several numbers of real or virtual ranks."""

    seeds: Annotated[
        int,
        option(
            "N",
            "Runs of each strategy on each number of ranks, with different seeds. Default: 5; 1 on virtual ranks, "
            "and for a script without {seed}.",
        ),
        COUNT,
    ] = 5
    strategies: Annotated[
        tuple[str, ...],
        option(
            "A,B:KEY=VALUE,...",
            "Strategies to compare. The options of one follow a colon.",
            autocompletion=completion.strategies,
        ),
        Reader(read_strategies),
    ] = ("allreduce",)
    ranks: Annotated[tuple[int, ...], option("N,N,...", "Numbers of ranks to run on."), Reader(_read_ranks)] = (1, 2)
    baselines: Annotated[
        tuple[str, ...],
        option("A,B", "Compare with other libraries, too: ddp (torch's own), horovod."),
        Reader(lambda given: tuple(",".join(given).split(","))),
    ] = ()
    rates: Annotated[
        Mapping[str, float],
        option("STRATEGY=RATE", "Learning rate of one strategy. May be repeated.", "--rate"),
        Reader(_read_rates),
    ] = field(default_factory=dict)
    tune: Annotated[int, option("N", "First search each strategy's learning rate, with N runs."), ANY] = 0
    controls: Annotated[
        bool,
        Option(help="Also train on one process with the batch of all ranks; if ranks are virtual, on one rank, too."),
    ] = True

    @property
    def command(self) -> str:
        """Return the command that runs it: `hpcdist compare` or `hpcdist simulate`."""
        return "compare" if self.virtual is None else "simulate"

    @property
    def max_ranks(self) -> int:
        """Return the number of ranks of the largest run."""
        return max(self.ranks)


@dataclass(frozen=True, kw_only=True)
class Sweep(Experiment):
    """A search for good settings of a job, with one strategy on one number of ranks."""

    command = "sweep"
    seeds: Annotated[int, Option(help="Runs of each combination, with different seeds."), COUNT] = 1
    strategy: Annotated[
        str, option("NAME:KEY=VALUE,...", "Strategy of all runs.", autocompletion=completion.strategies)
    ] = "allreduce"
    over: Annotated[
        tuple[str, ...],
        option("KEY=VALUES", "Setting and values: A,B,C or LOW..HIGH[:log][:POINTS]. May be repeated."),
        Reader(_read_over),
    ]
    trials: Annotated[int, Option("--runs", help="Number of combinations to try; a grid has all."), COUNT] = 20
    ranks: Annotated[int, Option(help="Ranks of each run."), COUNT] = 1
    sampler: Annotated[
        str, option("NAME", "How combinations are chosen: tpe (near good ones), random, or grid (all).")
    ] = "tpe"
    pruner: Annotated[
        str,
        option(
            "NAME",
            "Which runs end early: asha (after 1/9 and 1/3 of the evaluations all but the best third), median "
            "(runs worse than the median), or none.",
        ),
    ] = "none"

    @property
    def max_ranks(self) -> int:
        return self.ranks


# --- how to run -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Execution:
    """How and where to run an experiment; these options do not change its results.

    Raises:
        ConfigError: `launcher` and Slurm's options exclude each other.
    """

    output: Annotated[Path | None, option("FOLDER", "Folder for all files. Default: runs/COMMAND-JOB, or -2...")] = None
    launcher: Launcher = None
    slurm: Annotated[
        str | None,
        option(
            "SITE",
            "Submit the runs as Slurm's job arrays: a cluster's profile, NAME or TOML.",
            autocompletion=sites,
        ),
    ] = None
    slurm_set: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE",
            "Setting of these jobs, such as time_min=30; may be repeated.",
            autocompletion=completion.specification,
        ),
    ] = None
    jobs: Annotated[int | None, option("N", "Concurrent runs. Default: as many as fit on the cores.", min=1)] = None

    def __post_init__(self) -> None:
        if self.slurm is not None and self.launcher is not None:
            raise ConfigError(f"--launcher must be omitted with --slurm, whose profile has one; got {self.launcher!r}.")
        if self.slurm is None and self.slurm_set:
            raise ConfigError("--slurm must be given with --slurm-set; got none. Such as --slurm generic.")
