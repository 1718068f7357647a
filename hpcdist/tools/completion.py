"""Complete words of the command line: names of plug-ins, settings and their values, folders of runs.

A shell waits for the answer, and importing the classes of settings takes seconds, for torch: after the first answer the
user's cache folder keeps what they declare.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
from typer.core import TyperArgument, TyperOption

from hpcdist.errors import HpcdistError
from hpcdist.registry import catalogue, installed
from hpcdist.tools.slurm.places import sites as known_sites

VARIABLE = "_HPCDIST_COMPLETE"  # by which a shell asks
Completer = Callable[[Any, str], list[str]]
Tables = dict[str, dict[str, tuple[str, list[str]]]]  # default and values of each setting, by its owner


# --- completers, for `autocompletion` of arguments and options --------------------------------------------------------
def names(group: str) -> Completer:
    """Complete the name of a plug-in."""
    return lambda ctx, incomplete: catalogue(group).available()


def datasets(ctx: Any, incomplete: str) -> list[str]:
    """Complete the name of an importer."""
    return [name.replace("_", "-") for name in catalogue("importers").available()]


def sites(ctx: Any, incomplete: str) -> list[str]:
    """Complete the name of a cluster's profile."""
    return known_sites()


def runs(ctx: Any, incomplete: str) -> list[str]:
    """Complete the folder of a run, or one with several: `runs`, or a comparison's in it."""
    found = (path.parent for pattern in ("*/run.json", "*/*/run.json") for path in Path("runs").glob(pattern))
    return sorted({str(folder) for run in found for folder in (run, run.parent)})


def strategies(ctx: Any, incomplete: str) -> list[str]:
    """Complete the last of several strategies, as in `allreduce,softsync:splits=2`, or an option of it."""
    started = re.split(r",(?=[^,=]*$)", incomplete)[-1]
    before = incomplete[: len(incomplete) - len(started)]
    name, colon, option = started.partition(":")
    if not colon:
        return [before + name for name in catalogue("strategies").available()]
    options = fields(f"strategies/{name}")
    return [f"{before}{name}:{found}" for found in _of_table(options, option)]


def settings(ctx: Any, incomplete: str) -> list[str]:
    """Complete KEY=VALUE for the command of `ctx`."""
    words = ctx.command_path.split()
    if words[-1] in ("import", "topology"):
        group = "importers" if words[-1] == "import" else "topologies"
        name = ctx.params.get("name") or "".join(ctx.args[:1])  # not parsed before the last option has its value
        return _of_table(fields(f"{group}/{name}"), incomplete)
    if "slurm" in words:
        return specification(ctx, incomplete)
    return _of_table(_of_job(ctx.params.get("overrides") or ctx.params.get("settings") or []), incomplete)


def specification(ctx: Any, incomplete: str) -> list[str]:
    """Complete KEY=VALUE of a job for Slurm."""
    known = {"site": known_sites(), "strategy": catalogue("strategies").available()}
    found = fields("slurm")
    return _of_table(found | {key: found[key]._replace(values=tuple(known[key])) for key in known}, incomplete)


def _of_table(options: dict[str, Setting], incomplete: str) -> list[str]:
    """Complete KEY or KEY=VALUE by a table of settings.

    The only key that fits is completed with its values, or its default: with one word alone, shells add a space.
    """
    key, equals, _ = incomplete.partition("=")
    fitting = [key] if equals and key in options else [name for name in options if name.startswith(key)]
    if len(fitting) != 1:
        return [f"{name}=" for name in fitting]
    found = options[fitting[0]]
    return [f"{fitting[0]}={value}" for value in (found.values or ("", found.default or "VALUE"))]


# --- settings, as their classes declare them --------------------------------------------------------------------------
class Setting(NamedTuple):
    """A default as text, and the values if they are few."""

    default: str
    values: tuple[str, ...] = ()


def _of_job(given: Sequence[str]) -> dict[str, Setting]:
    """Return the settings of a job by their dotted keys, with those of the algorithms that `given` names."""
    chosen = dict(text.partition("=")[::2] for text in given)
    found = fields("job")
    groups = {"strategy": "strategies", "strategy.compression": "compressors", "strategy.topology": "topologies"}
    for key, group in groups.items():
        if (named := found.get(f"{key}.name")) is not None:
            found[key] = found[f"{key}.name"] = named._replace(values=tuple(catalogue(group).available()))
            name = chosen.get(f"{key}.name", chosen.get(key, named.default))
            found |= {f"{key}.{option}": value for option, value in fields(f"{group}/{name}").items()}
    found["parallel.schedule"] = found["parallel.schedule"]._replace(values=tuple(catalogue("schedules").available()))
    for key in ("optimizer", "schedule"):
        found[key] = found[f"{key}.name"]
    return found


def fields(owner: str) -> dict[str, Setting]:
    """Return the settings of an owner by their dotted keys: `job`, `slurm`, or a plug-in, as `strategies/softsync`."""
    return {
        key: Setting(default, tuple(values))
        for key, (default, values) in _tables().get(owner.replace("-", "_"), {}).items()
    }


@cache
def _tables() -> Tables:
    """Return the settings of every owner, from the user's cache folder if hpcdist and its plug-ins are the same."""
    package = Path(__file__).parents[1]
    made_from = [str(package), max(path.stat().st_mtime_ns for path in package.rglob("*.py")), installed()]
    # Not comm.cache, which imports pydantic.
    file = platformdirs.user_cache_path("hpcdist", appauthor=False) / "completion.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        kept = json.loads(file.read_text())
        if kept["made_from"] == made_from:
            return kept["tables"]
    tables = _describe_all()
    with suppress(OSError, HpcdistError):  # without a cache the next answer takes as long
        from hpcdist.records import replace_durably

        file.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(file, json.dumps({"made_from": made_from, "tables": tables}).encode())
    return tables


def _describe_all() -> Tables:
    """Describe the settings of all that hpcdist has. Imports all of it, and torch."""
    from torch.optim import lr_scheduler

    from hpcdist.config import JobConfig, describe, optimizers, options_of
    from hpcdist.config.optimizer import subclasses
    from hpcdist.tools.slurm.spec import JobSpec

    owners: dict[str, Any] = {"job": JobConfig, "slurm": JobSpec}
    for group in ("strategies", "compressors", "topologies", "importers"):
        for name in catalogue(group).available():
            with suppress(HpcdistError):  # of another package's that can't be imported
                found = catalogue(group).load(name)
                owners[f"{group}/{name}"] = getattr(found, "Config", None) or options_of(found)
    classes = {"optimizer.name": optimizers(), "schedule.name": subclasses(lr_scheduler, lr_scheduler.LRScheduler)}
    return {
        owner: {
            option.key: (option.default.strip("'"), list(classes.get(option.key, option.choices)))
            for option in describe(model)
        }
        for owner, model in owners.items()
    }


# --- shells -----------------------------------------------------------------------------------------------------------
def answer(command: Any) -> None:
    """Print what a shell asks for. Nothing else is to be done in this process.

    Bash divides words at `=` and `:`, and expects what follows the last of these.
    """
    for kind in (TyperArgument, TyperOption):  # their conversion of values imports pydantic
        kind.process_value = lambda self, ctx, value: value  # type: ignore[method-assign]
    if not os.environ[VARIABLE].endswith("_bash"):
        command.main(prog_name="hpcdist")
        return
    words, current = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    joined = re.sub(r"(?<=[=:])\n|\n(?=[=:]+(?:\n|$))", "", "\n".join(words[: current + 1]))
    whole = joined.split("\n")
    before = whole[-1].removesuffix(words[current].strip("=:"))  # what bash has in words before its current one
    os.environ |= {"COMP_WORDS": "\n".join(whole), "COMP_CWORD": str(len(whole) - 1)}
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        command.main(prog_name="hpcdist")
    sys.stdout.writelines(f"{line.removeprefix(before)}\n" for line in printed.getvalue().splitlines())
