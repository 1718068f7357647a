"""Weights & Biases, offline."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from hpcdist.session.loggers.base import LoggedRun, Logger


class WandB(Logger):
    """Write an offline run. `wandb sync FOLDER/wandb/wandb/offline-run-*` uploads it, given a network.

    A resumed run has a folder for each start; with `--append` they become one run.
    """

    package = "wandb"

    def __init__(self, run: LoggedRun):
        import wandb

        self._run = wandb.init(
            project="hpcdist", name=run.name, id=run.id(lambda: secrets.token_hex(8)), dir=str(run.folder),
            config=dict(run.settings), mode="offline",
            settings=wandb.Settings(silent=True, console="off"),  # don't redirect the terminal
        )  # fmt: skip

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
