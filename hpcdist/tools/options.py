"""Options that several commands and experiments have, and the readers of their texts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

from typer import Option

from hpcdist.errors import ConfigError
from hpcdist.tools import completion

Launcher = Annotated[
    str | None, Option(metavar="COMMAND", help="Command that starts ranks: 'srun --mpi=pmix -n'. Default: mpirun -n.")
]
Config = Annotated[Path | None, Option(metavar="TOML", help="File of settings.")]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--set", metavar="KEY=VALUE", help="Override a setting. May be repeated.", autocompletion=completion.settings
    ),
]
Target = Annotated[
    str | None,
    Option(metavar="METRIC=VALUE", help="Result to reach, such as accuracy=0.97. The time until then is shown."),
]


def read_number(option: str, form: str, example: str, text: str) -> tuple[str, float]:
    """Read NAME=NUMBER, as an option's value.

    Args:
        form, example: of such a value, for the message.

    Raises:
        ConfigError: it is something else.
    """
    name, _, number = text.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(number)
    raise ConfigError(f"{option} must be {form}; got {text!r}. Write it as {example}.")


def read_target(text: str) -> tuple[str, float]:
    """Read the value of --target: a metric and the value of it to be reached."""
    return read_number("--target", "METRIC=VALUE", "accuracy=0.97", text)


def read_counts(option: str, text: str) -> list[int]:
    """Read numbers with commas between them, as an option's value.

    Raises:
        ConfigError: they are none.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) for word in words):
        raise ConfigError(f"{option} must be whole numbers above 0, with commas between them; got {text!r}.")
    return list(map(int, words))
