"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from hpcdist.session.loggers.base import LoggedRun, Logger


class TensorBoard(Logger):
    """Write event files. View them with `tensorboard --logdir FOLDER`, of one run or several."""

    package = "tensorboard"

    def __init__(self, run: LoggedRun):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(str(run.folder), purge_step=run.first_step if run.first_step > 1 else None)
        self._file = cast(Any, self._writer.file_writer)  # None before the first value
        # `add_hparams` would write a separate run.
        *start, self._end = hparams(dict(run.settings), dict.fromkeys(run.metrics, 0.0))
        for summary in start:
            self._file.add_summary(summary)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.add_summary(self._end)
        self._writer.close()
