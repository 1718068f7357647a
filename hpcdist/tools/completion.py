"""Shell completion: names of plug-ins, settings and their values, folders of runs.

Importing the classes of all settings takes seconds, because of torch. The first completion therefore caches them in a
file in the user's cache folder.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
from typer.core import TyperArgument, TyperOption

from hpcdist.errors import HpcdistError
from hpcdist.registry import catalogue, installed
from hpcdist.tools.slurm.places import sites

VARIABLE = "_HPCDIST_COMPLETE"  # set by a shell that asks for completion
Tables = dict[str, dict[str, tuple[str, list[str]]]]  # default and values of each setting, by its owner


# --- completers, for `autocompletion` of arguments and options --------------------------------------------------------
def datasets() -> list[str]:
    return [name.replace("_", "-") for name in catalogue("importers").available()]


def runs() -> list[str]:
    """Complete the folder of a run, or a folder with several runs."""
    run_folders = (path.parent for pattern in ("*/run.json", "*/*/run.json") for path in Path("runs").glob(pattern))
    return sorted({str(folder) for run in run_folders for folder in (run, run.parent)})


def strategies(ctx: Any, incomplete: str) -> list[str]:
    """Complete the last of several strategies, as in `allreduce,softsync:splits=2`, or its options."""
    last = re.split(r",(?=[^,=]*$)", incomplete)[-1]
    before = incomplete[: len(incomplete) - len(last)]
    name, colon, option = last.partition(":")
    if not colon:
        return [before + name for name in catalogue("strategies").available()]
    options = fields(f"strategies/{name}")
    return [f"{before}{name}:{completed}" for completed in _of_table(options, option)]


def settings(ctx: Any, incomplete: str) -> list[str]:
    """Complete KEY=VALUE for the current command."""
    words = ctx.command_path.split()  # such as hpcdist, data, import
    if words[-1] in ("import", "topology"):
        group = "importers" if words[-1] == "import" else "topologies"
        name = ctx.params.get("name") or "".join(ctx.args[:1])  # not parsed while an option lacks its value
        return _of_table(fields(f"{group}/{name}"), incomplete)
    if "slurm" in words:
        return specification(ctx, incomplete)
    return _of_table(_of_job(ctx.params.get("overrides") or ctx.params.get("settings") or []), incomplete)


def specification(ctx: Any, incomplete: str) -> list[str]:
    known = {"site": sites(), "strategy": catalogue("strategies").available()}
    table = fields("slurm")
    return _of_table(table | {key: table[key]._replace(values=tuple(known[key])) for key in known}, incomplete)


def _of_table(options: dict[str, Setting], incomplete: str) -> list[str]:
    """Complete KEY or KEY=VALUE from a table of settings.

    A single matching key is completed with its values or default: after a single completion, shells would add a space.
    """
    key, equals, _ = incomplete.partition("=")
    matching = [key] if equals and key in options else [name for name in options if name.startswith(key)]
    if len(matching) != 1:
        return [f"{name}=" for name in matching]
    setting = options[matching[0]]
    return [f"{matching[0]}={value}" for value in (setting.values or ("", setting.default or "VALUE"))]


# --- settings ---------------------------------------------------------------------------------------------------------
class Setting(NamedTuple):
    """Default of a setting as text, and its values if they are few."""

    default: str
    values: tuple[str, ...] = ()


def _of_job(overrides: Sequence[str]) -> dict[str, Setting]:
    """Return a job's settings by dotted key, with the options of the algorithms that the KEY=VALUE texts name."""
    chosen = dict(text.partition("=")[::2] for text in overrides)
    table = fields("job")
    groups = {"strategy": "strategies", "strategy.compression": "compressors", "strategy.topology": "topologies"}
    for key, group in groups.items():
        if (setting := table.get(f"{key}.name")) is not None:
            table[key] = table[f"{key}.name"] = setting._replace(values=tuple(catalogue(group).available()))
            name = chosen.get(f"{key}.name", chosen.get(key, setting.default))
            table |= {f"{key}.{option}": value for option, value in fields(f"{group}/{name}").items()}
    table["parallel.schedule"] = table["parallel.schedule"]._replace(values=tuple(catalogue("schedules").available()))
    for key in ("optimizer", "schedule"):
        table[key] = table[f"{key}.name"]
    return table


def fields(owner: str) -> dict[str, Setting]:
    """Return settings by dotted key: of a job (`job`), a Slurm job (`slurm`), or a plug-in (`strategies/softsync`)."""
    return {
        key: Setting(default, tuple(values))
        for key, (default, values) in _tables().get(owner.replace("-", "_"), {}).items()
    }


@cache
def _tables() -> Tables:
    """Return all settings, from the cache file if hpcdist and its plug-ins are unchanged since it was written."""
    package = Path(__file__).parents[1]
    made_from = [str(package), max(path.stat().st_mtime_ns for path in package.rglob("*.py")), installed()]
    # Not comm.cache, which imports pydantic.
    file = platformdirs.user_cache_path("hpcdist", appauthor=False) / "completion.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        cached = json.loads(file.read_text())
        if cached["made_from"] == made_from:
            return cached["tables"]
    tables = _describe_all()
    with suppress(OSError, HpcdistError):  # without a cache the next completion is as slow
        from hpcdist.records import replace_durably

        file.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(file, json.dumps({"made_from": made_from, "tables": tables}).encode())
    return tables


def _describe_all() -> Tables:
    """Describe all settings of hpcdist and its plug-ins; imports torch."""
    from torch.optim import lr_scheduler

    from hpcdist.config.job import JobConfig
    from hpcdist.config.optimizer import optimizers, subclasses
    from hpcdist.config.settings import describe, options_of
    from hpcdist.tools.slurm.spec import JobSpec

    owners: dict[str, Any] = {"job": JobConfig, "slurm": JobSpec}
    for group in ("strategies", "compressors", "topologies", "importers"):
        for name in catalogue(group).available():
            with suppress(HpcdistError):  # a plug-in of another package that can't be imported
                loaded = catalogue(group).load(name)
                owners[f"{group}/{name}"] = getattr(loaded, "Config", None) or options_of(loaded)
    classes = {"optimizer.name": optimizers(), "schedule.name": subclasses(lr_scheduler, lr_scheduler.LRScheduler)}
    return {
        owner: {
            option.key: (option.default.strip("'"), list(classes.get(option.key, option.choices)))
            for option in describe(model)
        }
        for owner, model in owners.items()
    }


# --- shells -----------------------------------------------------------------------------------------------------------
def complete(command: Any) -> None:
    """Print the completions that the shell asks for; of bash, which splits at `=` and `:`, the last part only."""
    for kind in (TyperArgument, TyperOption):  # typer's conversion of values imports pydantic
        kind.process_value = lambda self, ctx, value: value  # type: ignore[method-assign]
    if not os.environ[VARIABLE].endswith("_bash"):
        command.main(prog_name="hpcdist")
        return
    words, current = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    # Join what bash has split at `=` and `:`.
    joined = re.sub(r"(?<=[=:])\n|\n(?=[=:]+(?:\n|$))", "", "\n".join(words[: current + 1]))
    joined_words = joined.split("\n")
    before = joined_words[-1].removesuffix(words[current].strip("=:"))  # part that bash has split off
    os.environ |= {"COMP_WORDS": "\n".join(joined_words), "COMP_CWORD": str(len(joined_words) - 1)}
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        command.main(prog_name="hpcdist")
    sys.stdout.writelines(f"{line.removeprefix(before)}\n" for line in printed.getvalue().splitlines())
