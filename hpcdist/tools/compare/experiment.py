"""Experiments as values: a comparison of strategies, or a sweep over settings; and how their runs are made.

A field is an option of `hpcdist compare|simulate|sweep`, an argument of the functions of the same names, and a key of
`declared` in `comparison.json`. Its annotation says how: an `Option` describes it to users, a `Reader` reads what they
give. The command line reads these annotations, so this module must not load pydantic, which checks them in files.
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

from hpcdist.errors import ConfigError, DataError
from hpcdist.tools import completion
from hpcdist.tools.options import Launcher, read_counts, read_number, read_target

E = TypeVar("E", bound="Experiment")
COUNT = Interval(ge=1, le=100_000)  # of what a file may ask for
ANY = Interval(ge=0)
BUDGETS = ("samples", "steps", "seconds")
COMMAS = re.compile(r",(?![^\[{]*[\]}])")  # that are in no brackets
_OPTION = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*=")


# --- what users give --------------------------------------------------------------------------------------------------
class Reader(NamedTuple):
    """Reads a field as it is given: the texts of its option, or a value in Python."""

    read: Callable[[Any], Any]


def read_budget(given: Mapping[str, float] | Sequence[str]) -> dict[str, float]:
    """Read a budget: numbers by unit, or items UNIT=NUMBER, or several with commas between them.

    Raises:
        ConfigError: a unit is unknown, or a number is none or not above 0.
    """
    items = [f"{unit}={limit}" for unit, limit in given.items()] if isinstance(given, Mapping) else given
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


def read_strategies(given: Sequence[str]) -> tuple[str, ...]:
    """Split `a,b:key=value,key=value,c` at the commas between strategies: an item `key=value` is the former one's.

    Raises:
        ConfigError: an option stands before any strategy, or a name is empty.
    """
    found: list[str] = []
    for item in map(str.strip, COMMAS.split(text := ",".join(given))):
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
    return tuple(found)


def _read_ranks(given: Sequence[object]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(read_counts("--ranks", ",".join(map(str, given)))))


def _read_rates(given: Mapping[str, float] | Sequence[str]) -> dict[str, float]:
    return dict(
        given.items()
        if isinstance(given, Mapping)
        else (read_number("--rate", "STRATEGY=RATE", "allreduce=0.01", item) for item in given)
    )


def _read_over(given: Mapping[str, str | Sequence[object]] | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(given, Mapping):
        return tuple(given)
    return tuple(f"{key}={v if isinstance(v, str) else ','.join(map(str, v))}" for key, v in given.items())


# --- experiments ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What all runs of a comparison, a sweep or a study share. Another one is refused in the same folder.

    Attributes:
        job: the job's file; or that of a script with its own training loop, or a function, as path/to/file.py:name.
        job_sha256: of its content.
        arguments: of the script; None for a job.
        metric: of the job, by which runs are judged; empty for a script's first one.
        target: the metric's value to reach; None for none.
        settings: of every run, as `--set` takes them.
        virtual: cluster of virtual ranks; None for real ones.
    """

    job: str
    job_sha256: str = ""
    arguments: tuple[str, ...] | None = None
    metric: str
    target: float | None = None
    budget: Annotated[
        Mapping[str, int | float],
        Option(metavar="UNIT=N", help="When each run ends: samples=N (of all ranks), steps=N or seconds=N."),
        Reader(read_budget),
    ] = field(default_factory=dict)
    evaluations: Annotated[
        int,
        Option(help="Evaluations of a run with a budget of samples or steps. 0: after epochs only."),
        ANY,
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
        **given: Any,
    ) -> E:
        """Read an experiment as users give it: the texts of options, or values in Python.

        Args:
            job: path of a Python file that defines `job`, or of a script with its own training loop; or a function with
                such a loop, which is imported from its file.
            target: a metric and its value to reach; without one the metric is the job's first.
            arguments: of a script.
            config: TOML file of settings.
            settings: of all runs, each KEY=VALUE; they win over the file.
            given: all other fields; those that are None or empty have their defaults.

        Raises:
            ConfigError: the job is no path, or a setting is wrong, of another type or out of bounds.
        """
        from hpcdist.config.merge import as_flags, load
        from hpcdist.records.files import checked
        from hpcdist.tools.compare.script import read_job
        from hpcdist.train import load_job

        hints = get_type_hints(cls, include_extras=True)
        reference, file, words, seeded = read_job(job, arguments)
        if not seeded and given.get("seeds") is None:
            given["seeds"] = 1
        given = {name: value for name, value in given.items() if value is not None and value != []}
        for name in given.keys() & hints.keys():
            for reader in (one for one in get_args(hints[name]) if isinstance(one, Reader)):
                given[name] = reader.read(given[name])
        target = read_target(target) if isinstance(target, str) else target
        if target is not None:
            metric, value = target
        else:
            metric, value = next(iter(load_job(file).metrics), "loss") if words is None else "", None
        made = cls(
            job=reference,
            arguments=words,
            job_sha256=hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
            metric=metric,
            target=value,
            settings=tuple(as_flags(load({}, None if config is None else Path(config), settings or ()))),
            **given,
        )
        try:
            checked(asdict(made), cls, f"options of {cls.__name__}", "be of their types, within bounds")
        except DataError as error:
            raise ConfigError(str(error)) from None
        return made


@dataclass(frozen=True, kw_only=True)
class Comparison(Experiment):
    """A comparison of strategies, each on several numbers of ranks, on real or virtual ones."""

    seeds: Annotated[
        int,
        Option(
            metavar="N",
            help="Runs of each strategy on each number of ranks, with other seeds. Default: 5; 1 on virtual ranks, and "
            "for a script without {seed}.",
        ),
        COUNT,
    ] = 5
    strategies: Annotated[
        tuple[str, ...],
        Option(
            metavar="A,B:KEY=VALUE,...",
            help="Strategies to compare. The options of one follow a colon.",
            autocompletion=completion.strategies,
        ),
        Reader(read_strategies),
    ] = ("allreduce",)
    ranks: Annotated[
        tuple[int, ...], Option(metavar="N,N,...", help="Numbers of ranks to run on."), Reader(_read_ranks)
    ] = (1, 2)
    baselines: Annotated[
        tuple[str, ...],
        Option(metavar="A,B", help="Compare with other libraries, too: ddp (torch's own), horovod."),
        Reader(lambda given: tuple(",".join(given).split(","))),
    ] = ()
    rates: Annotated[
        Mapping[str, float],
        Option("--rate", metavar="STRATEGY=RATE", help="Learning rate of one of the --strategies. May be repeated."),
        Reader(_read_rates),
    ] = field(default_factory=dict)
    tune: Annotated[
        int,
        Option(metavar="RUNS", help="First search a learning rate for each strategy, in so many runs."),
        ANY,
    ] = 0
    controls: Annotated[
        bool,
        Option(help="Also train on one process with the batch of all ranks; if ranks are virtual, on one rank, too."),
    ] = True

    @property
    def command(self) -> str:
        """Return the command of hpcdist that makes its runs."""
        return "compare" if self.virtual is None else "simulate"

    @property
    def most_ranks(self) -> int:
        """Return the ranks of its largest run."""
        return max(self.ranks)


@dataclass(frozen=True, kw_only=True)
class Sweep(Experiment):
    """A search for good settings of a job, with one strategy on one number of ranks."""

    command = "sweep"
    seeds: Annotated[int, Option(help="Runs of each combination, with different seeds."), COUNT] = 1
    strategy: Annotated[
        str,
        Option(metavar="NAME:KEY=VALUE,...", help="Strategy of all runs.", autocompletion=completion.strategies),
    ] = "allreduce"
    over: Annotated[
        tuple[str, ...],
        Option(metavar="KEY=VALUES", help="Setting and values: A,B,C or LOW..HIGH[:log][:POINTS]. May be repeated."),
        Reader(_read_over),
    ]
    trials: Annotated[int, Option("--runs", help="Number of combinations to try; a grid has all."), COUNT] = 20
    ranks: Annotated[int, Option(help="Ranks of each run."), COUNT] = 1
    sampler: Annotated[
        str,
        Option(
            metavar="NAME", help="How combinations are chosen: tpe (near those that were good), random, or grid (all)."
        ),
    ] = "tpe"
    pruner: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Which runs end early: asha (all but the best third, after 1/9 and 1/3 of the evaluations), median "
            "(those worse than the median), or none.",
        ),
    ] = "none"

    @property
    def most_ranks(self) -> int:
        """Return the ranks of each run."""
        return self.ranks


# --- how runs are made ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Execution:
    """How and where the runs of an experiment are made, which changes nothing of what they are.

    Raises:
        ConfigError: options of Slurm's jobs do not fit together.
    """

    output: Annotated[
        Path | None, Option(metavar="FOLDER", help="Folder for all files. Default: runs/COMMAND-JOB, or -2...")
    ] = None
    launcher: Launcher = None
    slurm: Annotated[
        str | None,
        Option(
            metavar="SITE",
            help="Submit the runs as Slurm's job arrays: a cluster's profile, NAME or TOML.",
            autocompletion=completion.sites,
        ),
    ] = None
    slurm_set: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=VALUE",
            help="Setting of these jobs, such as time_min=30; may be repeated.",
            autocompletion=completion.specification,
        ),
    ] = None
    jobs: Annotated[
        int | None, Option(min=1, metavar="N", help="Runs at the same time. Default: as many as have their own cores.")
    ] = None

    def __post_init__(self) -> None:
        if self.slurm is not None and self.launcher is not None:
            raise ConfigError(
                f"--launcher must be omitted with --slurm, whose profile has its own; got {self.launcher!r}."
            )
        if self.slurm is None and self.slurm_set:
            raise ConfigError("--slurm must be given with --slurm-set; got none. Such as --slurm generic.")
