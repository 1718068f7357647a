"""Complete words of the command line: names of plug-ins, settings and their values, folders of runs.

A shell waits for the answer, so settings are read from the source of their classes: importing these would take seconds,
for torch.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from typer.core import TyperArgument, TyperOption

import hpcdist
from hpcdist.registry import catalogue
from hpcdist.tools.slurm.places import sites as known_sites

VARIABLE = "_HPCDIST_COMPLETE"  # by which a shell asks
JOB = ("hpcdist.config.job", "JobConfig")
SPECIFICATION = ("hpcdist.tools.slurm.spec", "JobSpec")
Completer = Callable[[Any, str], list[str]]


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
    begun = re.split(r",(?=[^,=]*$)", incomplete)[-1]
    before = incomplete[: len(incomplete) - len(begun)]
    name, colon, option = begun.partition(":")
    if not colon:
        return [before + name for name in catalogue("strategies").available()]
    options = plugin_options("strategies", name)
    return [f"{before}{name}:{found}" for found in _of_table(options, option)]


def settings(ctx: Any, incomplete: str) -> list[str]:
    """Complete KEY=VALUE for the command of `ctx`."""
    words = ctx.command_path.split()
    if words[-1] in ("import", "topology"):
        group = "importers" if words[-1] == "import" else "topologies"
        name = ctx.params.get("name") or "".join(ctx.args[:1])  # not parsed before the last option has its value
        return _of_table(plugin_options(group, str(name)), incomplete)
    if "slurm" in words:
        return specification(ctx, incomplete)
    return _of_table(_of_job(ctx.params.get("overrides") or []), incomplete)


def specification(ctx: Any, incomplete: str) -> list[str]:
    """Complete KEY=VALUE of a job for Slurm."""
    known = {"site": known_sites(), "strategy": catalogue("strategies").available()}
    found = fields(*SPECIFICATION)
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


# --- settings, as their source declares them --------------------------------------------------------------------------
class Setting(NamedTuple):
    """A default as text, and the values if they are few."""

    default: str
    values: tuple[str, ...] = ()


def _of_job(given: Sequence[str]) -> dict[str, Setting]:
    """Return the settings of a job by their dotted keys, with those of the algorithms that `given` names."""
    chosen = dict(text.partition("=")[::2] for text in given)
    found = fields(*JOB)
    groups = {"strategy": "strategies", "strategy.compression": "compressors", "strategy.topology": "topologies"}
    for key, group in groups.items():
        if (named := found.get(f"{key}.name")) is not None:
            found[key] = found[f"{key}.name"] = named._replace(values=tuple(catalogue(group).available()))
            name = chosen.get(f"{key}.name", chosen.get(key, named.default))
            found |= {f"{key}.{option}": value for option, value in plugin_options(group, name).items()}
    found["parallel.schedule"] = found["parallel.schedule"]._replace(values=tuple(catalogue("schedules").available()))
    for key, module in (("optimizer", "__init__"), ("schedule", "lr_scheduler")):
        known = tuple(name for name in _torch_names(module) if name[0].isupper())
        found[key] = found[f"{key}.name"] = found[f"{key}.name"]._replace(values=known)
    return found


def plugin_options(group: str, name: str) -> dict[str, Setting]:
    """Return the options of a plug-in: the fields of its class's `Config`, or keyword-only arguments."""
    kind = catalogue(group)
    module = f"{kind.package}.{name.replace('-', '_')}"
    classes = [node for node in _tree(module) if isinstance(node, ast.ClassDef) and kind.member == "Class"]
    named = [node for node in classes if node.name.lower() == name.replace("_", "") or _is_final(node)]
    body = named[0].body if named else _tree(module)
    if named and (config := _nested(module, named[0], "Config")) is not None:
        return _fields_of(*config)
    makers = (node for node in body if isinstance(node, ast.FunctionDef) and node.name in ("__init__", kind.member))
    return next(map(_arguments, makers), {})


def _is_final(node: ast.ClassDef) -> bool:
    return any(ast.unparse(decorator) == "final" for decorator in node.decorator_list)


def fields(module: str, name: str) -> dict[str, Setting]:
    found = _class(module, name)
    return {} if found is None else _fields_of(*found)


def _fields_of(module: str, node: ast.ClassDef) -> dict[str, Setting]:
    """Return the fields of a class and of its bases, those of tables with dotted keys."""
    fields: dict[str, Setting] = {}
    for base in node.bases:
        if (parent := _named(module, base)) is not None:
            fields |= _fields_of(*parent)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_":
            key, annotation = item.target.id, _bare(item.annotation)
            table = _named(module, annotation)
            if table is None:
                fields[key] = Setting(_default(item.value), _values(module, annotation))
            else:
                inner = _fields_of(*table)
                if "name" in inner and (named := re.search(r"name='(\w+)'", ast.unparse(item.value or item.target))):
                    inner["name"] = Setting(named[1])
                fields |= {f"{key}.{name}": value for name, value in inner.items()}
    return fields


def _bare(annotation: ast.expr) -> ast.expr:
    """Return X of Annotated[X, ...], and any other annotation as it is."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        return getattr(annotation.slice, "elts", [annotation])[0]
    return annotation


def _arguments(function: ast.FunctionDef) -> dict[str, Setting]:
    given = zip(function.args.kwonlyargs, function.args.kw_defaults)
    return {argument.arg: Setting(_default(value), _values("", argument.annotation)) for argument, value in given}


def _default(value: ast.expr | None) -> str:
    """Return a field's default as it is written in a flag; empty if there is none, or none that is simple."""
    if isinstance(value, ast.Call):
        value = value.args[0] if value.args else None
    if not isinstance(value, ast.Constant) or value.value is ...:
        return ""
    return value.value if isinstance(value.value, str) else str(value.value).lower()


def _values(module: str, annotation: ast.expr | None) -> tuple[str, ...]:
    """Return the values of a type that has few: of booleans, and of Literal, behind a name too."""
    if isinstance(annotation, ast.BinOp):  # X | None
        return (*_values(module, annotation.left), *_values(module, annotation.right))
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        return tuple(str(ast.literal_eval(value)) for value in getattr(annotation.slice, "elts", [annotation.slice]))
    if isinstance(annotation, ast.Name) and annotation.id == "bool":
        return "true", "false"
    if isinstance(annotation, ast.Name) and module:
        for node in _tree(module):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == annotation.id:
                return _values(module, node.value)
    return ()


# --- source -----------------------------------------------------------------------------------------------------------
@cache
def _tree(module: str) -> Sequence[ast.stmt]:
    """Parse a module of hpcdist, without importing it or its packages."""
    base = Path(hpcdist.__file__).parents[1].joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        with suppress(OSError):
            body = ast.parse(path.read_text()).body
            return [node for each in body for node in (each.body if isinstance(each, ast.If) else [each])]
    return ()


def _named(module: str, expression: ast.expr) -> tuple[str, ast.ClassDef] | None:
    """Find the class that an expression names: `Settings`, or `Strategy.Config`."""
    if isinstance(expression, ast.Name):
        return _class(module, expression.id)
    if isinstance(expression, ast.Attribute) and (outer := _named(module, expression.value)) is not None:
        return _nested(*outer, expression.attr)
    return None


def _class(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """Find a class in a module of hpcdist, or where that imports it from."""
    for node in _tree(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpcdist"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _class(str(node.module), alias.name)
    return None


def _nested(module: str, node: ast.ClassDef, name: str) -> tuple[str, ast.ClassDef] | None:
    """Find a class in the body of another, or of that one's bases."""
    for item in node.body:
        if isinstance(item, ast.ClassDef) and item.name == name:
            return module, item
    parents = (_named(module, base) for base in node.bases)
    return next((found for parent in parents if parent and (found := _nested(*parent, name))), None)


def _torch_names(module: str) -> Iterator[str]:
    """Yield the public names of a module of torch.optim, by its source."""
    spec = importlib.util.find_spec("torch")
    for place in (spec and spec.submodule_search_locations) or ():
        with suppress(OSError):
            listed = re.search(r"__all__ = \[(.*?)\]", (Path(place) / f"optim/{module}.py").read_text(), re.S)
            yield from re.findall(r'"(\w+)"', listed[1] if listed else "")


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
