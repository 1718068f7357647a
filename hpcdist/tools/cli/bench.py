"""`hpcdist bench`: the commands of benchmarks/cli.py, which lies beside the package in a checkout, and in no wheel."""

from __future__ import annotations

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from hpcdist.errors import ConfigError
from hpcdist.tools.cli.base import on_all_ranks, prepare_help

FOLDER = Path(__file__).parents[3] / "benchmarks"


class Benchmarks(TyperGroup):
    """Imports the commands when one is used, or listed: not before, for a job may have a module of that name."""

    def list_commands(self, ctx: Any) -> list[str]:
        self._import()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._import()
        return super().get_command(ctx, cmd_name)

    def _import(self) -> None:
        if self.commands:
            return
        spec = spec_from_file_location("benchmarks", FOLDER / "__init__.py")
        if spec is None or spec.loader is None or not FOLDER.is_dir():
            raise ConfigError(
                f"hpcdist bench must run in a checkout of hpcdist, whose folder benchmarks it needs; got no {FOLDER}. "
                "Clone the project, and install it with `pip install -e .`."
            )
        package = sys.modules["benchmarks"] = module_from_spec(spec)
        spec.loader.exec_module(package)
        found: Any = typer.main.get_command(importlib.import_module("benchmarks.cli").app)
        prepare_help(found)
        self.commands.update(found.commands)


app = on_all_ranks(
    typer.Typer(
        name="bench",
        cls=Benchmarks,
        no_args_is_help=True,
        help="Measure a part of hpcdist beside its alternatives, in one run. Collective: start it with mpirun.",
    )
)


@app.callback()
def _group() -> None:
    pass  # typer makes no group of an app without commands
