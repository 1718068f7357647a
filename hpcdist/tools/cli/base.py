"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.errors import ConfigError

Config = Annotated[Path | None, typer.Option(metavar="TOML", help="File of settings.")]
JobFile = Annotated[Path, typer.Argument(help="Python file that defines `job`, such as jobs/digits.py.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")
]
Target = Annotated[
    str | None,
    typer.Option(metavar="METRIC=VALUE", help="Result to reach, such as accuracy=0.97. The time until then is shown."),
]


def read_target(target: str) -> tuple[str, float]:
    """Read `METRIC=VALUE`.

    Raises:
        ConfigError: it is something else.
    """
    metric, _, value = target.partition("=")
    try:
        return metric, float(value)
    except ValueError:
        raise ConfigError(f"--target must be METRIC=VALUE; got {target!r}. Write it as accuracy=0.97.") from None
