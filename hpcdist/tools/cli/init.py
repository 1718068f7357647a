"""`hpcdist init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.errors import ConfigError
from hpcdist.tools import console
from hpcdist.tools.cli.base import writable
from hpcdist.tools.options import argument

app = typer.Typer()
FIRST_JOB = Path(__file__).parents[2] / "train" / "first_job.py"


@app.command()
def init(
    file: Annotated[Path, argument("FILE", "Python file to write, such as my_job.py.", callback=writable)],
) -> None:
    """Write a first job with comments: a small model, its data and its metric. It trains as it is.

    Example: hpcdist init my_job.py
    """
    if file.suffix != ".py" or file.exists():
        problem = "which exists" if file.exists() else "whose name does not end in .py"
        raise ConfigError(f"FILE must be a new Python file; got {file}, {problem}. Give another name.")
    file.write_text(FIRST_JOB.read_text().replace("my_job.py", str(file)))
    console.note(f"{file} is written. Train it: hpcdist run -n 2 hpcdist train {file}")
