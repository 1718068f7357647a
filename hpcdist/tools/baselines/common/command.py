"""The command of a baseline: `mpirun -n 4 python -m hpcdist.tools.baselines.ddp JOB --output FOLDER --set ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hpcdist import session
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError
from hpcdist.faults.turns import takes_turn
from hpcdist.records import Summary
from hpcdist.tools import console
from hpcdist.tools.baselines.common.library import Library
from hpcdist.tools.baselines.common.loop import BaselineTrainer
from hpcdist.train import runs


def train(
    comm: Communicator,
    library: type[Library],
    job: Path,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    output: Path | None = None,
    command: Sequence[str] = (),
) -> Summary:
    """Collective. Train a job by a library in a folder; return the summary, the same on all ranks.

    Settings are those of `hpcdist train`, but for the strategy's, which are left out.

    Raises:
        ConfigError: a setting breaks its rule, is none of the library's, or the folder holds another run.
    """
    own = [setting for setting in overrides if not setting.startswith(("strategy=", "strategy."))]
    make = partial(BaselineTrainer, library)
    _, summary = runs.train(comm, job, config, own, output, command=command, make=make)
    return summary


def main(library: type[Library]) -> None:
    """Run the command line of a baseline on this rank; end all ranks with status 1 where it fails."""

    def baseline(
        job: Annotated[Path, typer.Argument(help="Python file that defines `job`.")],
        output: Annotated[Path, typer.Option(metavar="FOLDER", help="This run's folder.")],
        config: Annotated[Path | None, typer.Option(metavar="TOML", help="File of settings.")] = None,
        overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    ) -> None:
        comm = session.init()
        try:
            summary = train(comm, library, job, config, overrides or [], output, sys.argv)
        except HpcdistError as error:
            if comm.size == 1 or takes_turn(comm.rank):
                console.error(str(error))
            if comm.size > 1:
                comm.abort(1)
            raise typer.Exit(1) from None
        if comm.rank == 0:
            console.result(output, summary)

    typer.run(baseline)
