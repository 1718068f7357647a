"""Options shared by several commands and experiments, and their parsers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from hpcdist.errors import ConfigError
from hpcdist.tools import completion


def option(metavar: str, meaning: str, *names: str, **more: Any) -> Any:
    """Return an option with a value; `names` replace its parameter's, `more` are arguments of typer.Option."""
    return Option(*names, metavar=metavar, help=meaning, **more)


def argument(metavar: str, meaning: str, **more: Any) -> Any:
    return Argument(metavar=metavar, help=meaning, **more)


def flag(name: str, meaning: str) -> Any:
    """Return an option without a value."""
    return Option(name, help=meaning)


Launcher = Annotated[
    str | None, option("COMMAND", "Command that starts ranks: 'srun --mpi=pmix -n'. Default: mpirun -n.")
]
Config = Annotated[Path | None, option("TOML", "File of settings.")]
Overrides = Annotated[
    list[str] | None,
    option("KEY=VALUE", "Override a setting. May be repeated.", "--set", autocompletion=completion.settings),
]
Target = Annotated[
    str | None, option("METRIC=VALUE", "Result to reach, such as accuracy=0.97. The time until then is shown.")
]


IN_PYTHON = {"set": "settings", "rate": "rates"}  # arguments with other names than their options
OPTION = re.compile(  # not one in a command, or of a script
    r"`[^`]*`|(?<!\w)'[^']*'|(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?![\w-]| \{)"
)


@contextmanager
def named_as_arguments() -> Iterator[None]:
    """Let messages of a ConfigError name arguments of a Python function, `budget`, instead of options, `--budget`."""
    try:
        yield
    except ConfigError as error:
        error.args = (OPTION.sub(_argument, str(error)),)
        raise


def _argument(option: re.Match[str]) -> str:
    return option[0] if option[1] is None else IN_PYTHON.get(option[1], option[1].replace("-", "_"))


def read_number(option: str, form: str, example: str, text: str) -> tuple[str, float]:
    """Parse NAME=NUMBER, the value of an option; raise ConfigError, with `form` and `example`, for another form."""
    name, _, number = text.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(number)
    raise ConfigError(f"{option} must be {form}; got {text!r}. Write it as {example}.")


def read_target(text: str) -> tuple[str, float]:
    """Parse the value of --target: a metric and the value to reach."""
    return read_number("--target", "METRIC=VALUE", "accuracy=0.97", text)


def read_counts(option: str, text: str) -> list[int]:
    """Parse comma-separated whole numbers above 0, the value of an option; raise ConfigError for another form."""
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdigit() and int(item) for item in items):
        raise ConfigError(f"{option} must be whole numbers above 0, with commas between them; got {text!r}.")
    return list(map(int, items))
