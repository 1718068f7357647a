"""Options and helpers shared by several commands."""

from __future__ import annotations

import enum
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from typer.core import TyperGroup

from hpcdist.errors import ConfigError
from hpcdist.registry import catalogue
from hpcdist.tools.options import argument, option

ROOT = Path(__file__).parents[3]  # of a checkout
T = TypeVar("T")


def on_all_ranks(command: T) -> T:
    """Mark a command, or all commands of a typer.Typer, to run on all ranks; others run on the first rank only."""
    command.on_all_ranks = True  # type: ignore[attr-defined]
    return command


HELP = ["-h", "--help"]


def prepare_help(command: Any) -> None:
    """Change a command's help: lists of subcommands have whole first paragraphs, and metavars replace Python types."""
    command.context_settings.setdefault("help_option_names", HELP)
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
        elif parameter.metavar is None and not parameter.is_flag and not isinstance(parameter.default, enum.Enum):
            parameter.metavar = "N" if isinstance(parameter.default, (int, float)) else "TEXT"
    for inner in getattr(command, "commands", {}).values():
        inner.short_help = inner.short_help or " ".join((inner.help or "").partition("\n\n")[0].split())
        prepare_help(inner)


class CommandGroup(TyperGroup):
    """A group whose error about an unknown command lists the known ones, unless one has a similar name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if type(error).__name__ == "UsageError" and "Did you mean" not in (message := cast(Any, error).message):
                known = ", ".join(name for name, command in self.commands.items() if not command.hidden)
                cast(Any, error).message = f"{message} The commands of {ctx.command_path} are: {known}."
            raise


def command_group(name: str, meaning: str, cls: type[CommandGroup] = CommandGroup) -> typer.Typer:
    """Return an app whose commands stand under a name."""
    return typer.Typer(name=name, cls=cls, no_args_is_help=True, help=meaning)


def of_checkout(name: str, folder: str, meaning: str) -> typer.Typer:
    """Return an app with the commands in `folder`/cli.py, which exists in a checkout but not in the installed package.

    The file is imported only when one of its commands is used or listed, because a job may have modules of the same
    names.
    """

    class Commands(CommandGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            self._import()
            return super().list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            self._import()
            return super().get_command(ctx, cmd_name)

        def _import(self) -> None:
            if self.commands:
                return
            require_checkout(name, f"{folder}/cli.py")
            sys.path.insert(0, str(ROOT))
            group: Any = typer.main.get_command(import_module(f"{folder.replace('/', '.')}.cli").app)
            prepare_help(group)
            self.commands.update(group.commands)

    app = command_group(name, meaning, Commands)
    app.callback()(lambda: None)  # typer needs it to create a group without commands
    return app


def require_checkout(command: str, file: str) -> Path:
    """Return the path of a file of a checkout; raise ConfigError if the package was installed without it."""
    if not (ROOT / file).is_file():
        folder = Path(file).parent
        raise ConfigError(
            f"hpcdist {command} must run in a checkout of hpcdist, whose folder {folder} it needs; got none at "
            f"{ROOT / folder}. Clone the project, and install it with `pip install -e .`."
        )
    return ROOT / file


def writable(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """As an option's `callback`, return the path; raise ConfigError if it is a folder, or in no folder that exists."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        problem = "is a folder" if path.is_dir() else "is in no folder that exists"
        name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar
        raise ConfigError(f"{name} must be a file to write; got {path}, which {problem}. Give another name.")
    return path


def whole_number(meaning: str) -> Any:
    """Return an option for a whole number above 0."""
    return option("N", meaning, min=1)


def plugin(group: str, meaning: str) -> Any:
    """Return an option for the name of a plug-in."""
    return option("NAME", meaning, autocompletion=catalogue(group).available)


Json = Annotated[Path | None, option("FILE", "Also write all values to this file.", "--json", callback=writable)]
JobFile = Annotated[Path, argument("JOB", "Python file that defines `job`, such as jobs/digits.py.")]
