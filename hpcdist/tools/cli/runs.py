"""`hpcdist runs`: list, show, tag, remove and compare the runs of a folder."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from hpcdist.errors import ConfigError, UnknownNameError, suggestion
from hpcdist.tools import completion, console
from hpcdist.tools.cli.base import CommandGroup
from hpcdist.tools.options import argument, flag, option

if TYPE_CHECKING:
    from hpcdist.tools.runs.listing import ListedRun

app = typer.Typer(name="runs", cls=CommandGroup, invoke_without_command=True)
HOME = Path("runs")  # default folder of `hpcdist train`
KEYS = ("job", "strategy", "ranks", "comparison")  # keys of --where; other keys are settings
ORDERS = ("folder", "state", "job", "strategy", "ranks", "age", "time", "metric")
Where = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE", "Only runs with this job, strategy, ranks, comparison or setting: optimizer.lr=0.1. Repeatable."
    ),
]
Tag = Annotated[list[str] | None, option("WORD", "Only runs with this tag. Repeatable.")]
Name = Annotated[str, argument("NAME", "Run.", autocompletion=completion.runs)]
Names = Annotated[
    list[str], argument("NAME", "Runs, by their folder, or its name in runs/.", autocompletion=completion.runs)
]


@app.callback()
def runs(
    context: typer.Context,
    folder: Annotated[Path, option("FOLDER", "Folder with runs in it.", "--in")] = HOME,
    where: Where = None,
    state: Annotated[
        str | None, typer.Option(help="Only runs that are running, ended, interrupted, failed, dead or damaged.")
    ] = None,
    tag: Tag = None,
    sort: Annotated[str, option("COLUMN", "Column that the rows are sorted by.")] = "age",
    as_json: Annotated[bool, flag("--json", "Print JSON, with numbers that are not rounded.")] = False,
) -> None:
    """List runs: state, metric, time and tags; runs of a comparison are grouped by its folder.

    Example: hpcdist runs --where strategy=allreduce --where optimizer.lr=0.1 --state ended --sort metric
    """
    if context.invoked_subcommand is not None:
        return
    from pydantic_core import to_json

    from hpcdist.tools.runs.listing import ListedState

    if state is not None and state not in get_args(ListedState):
        raise UnknownNameError("--state", state, get_args(ListedState))
    if sort not in ORDERS:
        raise UnknownNameError("--sort", sort, ORDERS)
    if not folder.is_dir():
        raise ConfigError(f"--in must be a folder with runs in it; got {folder}. `hpcdist train` creates {HOME}.")
    listed = [one for one in select_runs([folder], where, tag) if state in (None, one.state)]
    listed.sort(key=lambda one: _sort_key(one, sort))
    if as_json:
        print(to_json([asdict(one) for one in listed], indent=1, inf_nan_mode="null").decode())
        return
    if not listed:
        console.note(f"no such runs in {folder}")
    for comparison, group in groupby(sorted(listed, key=lambda one: one.comparison or ""), lambda one: one.comparison):
        parent = Path(comparison or folder)
        table = [_row(one, parent) for one in group]
        console.rows(comparison, table, left_aligned=("run", "state", "metric", "tags"), whole=("run", "tags"))
    for one in listed:
        if one.damage is not None:
            console.note(f"{one.folder} is damaged: {one.damage}")


@app.command()
def show(name: Name) -> None:
    """Show a run: result, starts with their commands, checkpoints and settings."""
    from hpcdist.checkpoint.folder import listing as checkpoints
    from hpcdist.tools.runs.listing import read_listed
    from hpcdist.tools.runs.run import Run

    folder = _find(name)
    listed, run = read_listed(folder), Run(folder)
    best = None if run.summary is None else run.summary.best
    checkpoint_folder = Path((listed.settings.get("checkpoint") or {}).get("folder") or folder / "checkpoints")
    starts = [] if run.record is None else [run.record, *run.record.resumed]
    facts = {
        **_row(listed, folder.parent),
        "best": best and f"{best.metric} {best.value:.4g} at step {best.step}",
        "no result": run.failure,
        "last sign of life": _sign_of_life(folder) if listed.state == "running" else None,
        "checkpoints": ", ".join(path.name for path in checkpoints(checkpoint_folder)),
        "starts": {f"from step {start.step}, {start.started}": shlex.join(start.command) for start in starts},
        "changes": "; ".join(run.changes),
        "settings": listed.settings,
    }
    console.facts({key: value for key, value in facts.items() if value not in (None, "", {})})


def _sign_of_life(folder: Path) -> str:
    """Describe when a run has last written to its folder, and whether its first process on this host has ended."""
    from hpcdist.records.lock import ended_holder
    from hpcdist.tools.runs import quiet_s

    ended = ended_holder(folder)
    ago = f"{console.duration(quiet_s(folder))} ago"
    return ago if ended is None else f"{ago}; {ended}, has ended: the run is dead unless other ranks continue"


@app.command()
def tag(
    name: Name,
    words: Annotated[list[str], argument("WORD", "Tags.")],
    remove: Annotated[bool, flag("--remove", "Remove these tags.")] = False,
) -> None:
    """Add tags to a run, or remove them, also while it trains.

    Example: hpcdist runs tag digits-allreduce-4-1 baseline
    """
    from hpcdist.tools.runs.listing import read_tags, write_tags

    folder = _find(name)
    old_tags = set(read_tags(folder))
    write_tags(folder, old_tags - set(words) if remove else old_tags | set(words))


@app.command()
def rm(names: Names, yes: Annotated[bool, flag("--yes", "Remove them without asking.")] = False) -> None:
    """Remove runs with all their files; a run that is training is refused."""
    from hpcdist.records import locked
    from hpcdist.tools.runs.listing import read_listed

    folders = [_find(name) for name in names]
    for folder in folders:
        if read_listed(folder).state == "running":
            raise ConfigError(f"NAME must be a run that has stopped; got {folder}, which is running. End it first.")
    if not yes:
        typer.confirm(f"Remove {', '.join(map(str, folders))}?", abort=True)
    for folder in folders:
        with locked(folder):
            shutil.rmtree(folder)


@app.command()
def compare(names: Names) -> None:
    """Compare runs in the table of `hpcdist report`.

    Example: hpcdist runs compare digits-allreduce-4-1 digits-gossip_pull-4-1
    """
    from hpcdist.tools.report import table
    from hpcdist.tools.report.analysis import analyse
    from hpcdist.tools.report.results import read_jobs

    table.show(table.tables([analyse(job) for job in read_jobs([_find(name) for name in names])]))


# --- arguments and rows -----------------------------------------------------------------------------------------------
def _find(name: str) -> Path:
    """Return a run's folder from its path, or from its name in `runs`."""
    from hpcdist.tools.runs import FILES

    for folder in (Path(name), HOME / name):
        if any((folder / file).exists() for file in FILES):
            return folder
    raise ConfigError(f"NAME must be the folder of a run, or its name in {HOME}; got {name}. `hpcdist runs` lists all.")


def select_runs(folders: Sequence[Path], where: Iterable[str] | None, tags: Iterable[str] | None) -> list[ListedRun]:
    """Return the runs in folders that match --where and --tag.

    Raises:
        ConfigError: a condition is not KEY=VALUE, or no run has such a setting.
    """
    from hpcdist.tools.runs import find_runs
    from hpcdist.tools.runs.listing import read_listed

    conditions = [_condition(text) for text in where or ()]
    runs = [read_listed(run, comparison) for run, comparison in find_runs(folders).items()]
    for key, _ in conditions if runs else ():
        if key not in KEYS and all(_setting(run, key) is None for run in runs):
            known = {*KEYS, *(name for run in runs for name in run.settings)}
            raise ConfigError(f"--where must name a setting of a run; got {key!r}.{suggestion(key, known)}")
    return [
        run
        for run in runs
        if set(tags or ()) <= set(run.tags) and all(_matches(run, key, value) for key, value in conditions)
    ]


def _condition(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--where must be KEY=VALUE; got {text!r}. Such as strategy=allreduce.")
    return key, value


def _matches(run: ListedRun, key: str, value: str) -> bool:
    """Return whether a run's column or setting `key` has this value; 0.1 and 1e-1 are equal, as numbers."""
    if key == "comparison":
        return run.comparison is not None and value in (run.comparison, Path(run.comparison).name)
    actual: Any = getattr(run, key) if key in KEYS else _setting(run, key)
    with suppress(TypeError, ValueError):
        return float(actual) == float(value)
    return str(actual).lower() == value.lower()


def _setting(run: ListedRun, key: str) -> Any:
    """Return a run's setting by its dotted key; None without it."""
    value: Any = run.settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _metric(run: ListedRun) -> tuple[str, float] | None:
    """Return the name and value of a run's first metric, the loss if there is no other; None without any."""
    return next(iter(run.metrics.items()), None)


def _sort_key(run: ListedRun, column: str) -> Any:
    """Return a run's sort key for a column of ORDERS: missing values last, metrics in descending order."""
    if column == "metric":
        metric = _metric(run)
        return (True, 0.0) if metric is None else (False, -metric[1])
    value = getattr(run, f"{column}_s" if column in ("age", "time") else column)
    if column == "folder":  # digits-allreduce-4-10 after digits-allreduce-4-2
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", value)]
    return (value is None, 0.0 if value is None else value)


def _row(run: ListedRun, above: Path) -> dict[str, Any]:
    metric = _metric(run)
    return {
        "run": str(Path(run.folder).relative_to(above)),
        "state": run.state,
        "metric": "" if metric is None else f"{metric[0]} {metric[1]:.4f}",
        "time": "" if run.time_s is None else console.duration(run.time_s),
        "age": "" if run.age_s is None else console.duration(run.age_s),
        "tags": " ".join(run.tags),
        "strategy": run.strategy,
        "ranks": run.ranks,
        "job": run.job,
    }
