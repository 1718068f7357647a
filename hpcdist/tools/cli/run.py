"""`hpcdist run`."""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.errors import ConfigError
from hpcdist.tools.cli.base import whole_number
from hpcdist.tools.mpirun import start_script
from hpcdist.tools.options import Launcher, argument, flag, option

app = typer.Typer()
# Libraries for several ranks, and the launchers' variables.
_DISTRIBUTED = re.compile("hpcdist|distributed|horovod|mpi4py|lightning|accelerate|transformers|deepspeed|RANK|PROCID")


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[list[str], argument("SCRIPT", "Python file with its arguments, -m MODULE, or a program.")],
    ranks: Annotated[int | None, option("N", "Number of ranks to start. Required.", "-n", "--ranks", min=1)] = None,
    hosts: Annotated[
        str | None, option("HOST:N,...", "Hosts to start on, and the ranks on each. Default: this one.")
    ] = None,
    threads: Annotated[
        int | None, whole_number("Threads of each rank. Default: OMP_NUM_THREADS, or the cores that each rank gets.")
    ] = None,
    label: Annotated[bool, flag("--label", "Write the rank before each line of output.")] = False,
    launcher: Launcher = None,
) -> None:
    """Start a Python script on several ranks, with the mpirun of this environment.

    More ranks than cores, and root (in a container), are allowed. In a Slurm allocation mpirun starts ranks on its
    nodes. The exit status is mpirun's: nonzero if a rank fails, which ends the others.

    Example: hpcdist run -n 4 train.py --epochs 3
    """
    if ranks is None:
        raise ConfigError(
            "-n must be the number of ranks to start; got none. There is no default: often it is the number of GPUs, "
            f"or of cores (here {len(os.sched_getaffinity(0))}). Write it as hpcdist run -n 4 {shlex.join(script)}."
        )
    if ranks > 1 and _trains_alone(Path(script[0])):
        typer.echo(
            f"hpcdist: {script[0]} does not import hpcdist: each of the {ranks} ranks runs all of it, and trains a "
            "model of its own. Call hpcdist.init() and hpcdist.DistributedOptimizer(...) in it.",
            err=True,
        )
    status = start_script(
        script, ranks, os.environ, hosts=hosts, threads=threads, label=label, launcher=launcher, argv=sys.argv
    )
    raise typer.Exit(status)


def _trains_alone(script: Path) -> bool:
    """Return whether a Python file uses torch, no library for several ranks, and no modules beside it, which might."""
    try:
        text = script.read_text() if script.suffix == ".py" else ""
        nodes = list(ast.walk(ast.parse(text)))
    except (OSError, ValueError, SyntaxError):  # Python will say it
        return False
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    modules = {name.partition(".")[0] for name in names}
    beside = {path.stem for path in script.parent.iterdir()} if text else set()
    return "torch" in modules and not modules & beside and not _DISTRIBUTED.search(text)
