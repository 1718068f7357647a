"""Decide when a run saves a checkpoint."""

from __future__ import annotations

from hpcdist.config.job import JobConfig
from hpcdist.session.leaving import Leaving


class Saving:
    """Decides when a checkpoint is due, at the same step on all ranks, without a message.

    It is due every `every_steps` steps, every `every_s` seconds, at the end of an epoch or a run that took so long, and
    after the best evaluation so far (with `best`, if the run is as old, or early stopping may end it). Time is
    measured at the ranks' last sync point, the same on all; without sync points, as on virtual ranks, only steps count.

    Args:
        leaving: has the sync points at which ranks decide whether they leave; None without any.
    """

    def __init__(self, config: JobConfig, leaving: Leaving | None):
        self._config, self._waits, self._leaving = config.checkpoint, config.stop.patience is not None, leaving
        self._since: dict[str, float] = {}  # the run's start, the epoch's and the last checkpoint

    def is_due(self, step: int, *, epoch_ends: bool, run_ends: bool, improved: bool) -> bool:
        """Return whether to save after this step; `improved`: its evaluation is the best so far."""
        config, elapsed = self._config, self._elapsed()
        is_due = (config.every_steps > 0 and step % config.every_steps == 0) or (
            "checkpoint" in elapsed
            or (epoch_ends and "epoch" in elapsed)
            or (run_ends and "run" in elapsed)
            or (improved and config.best and (self._waits or "run" in elapsed))
        )
        if self._leaving is not None and self._leaving.clock_s is not None:
            self._since |= {"checkpoint": self._leaving.clock_s} if is_due else {}
            self._since |= {"epoch": self._leaving.clock_s} if epoch_ends else {}
        return is_due

    def _elapsed(self) -> set[str]:
        """Return which of checkpoint, epoch and run started at least `checkpoint.every_s` ago."""
        clock_s = None if self._leaving is None else self._leaving.clock_s
        if clock_s is None or not self._config.every_s:
            return set()
        if not self._since:
            self._since = dict.fromkeys(("run", "epoch", "checkpoint"), clock_s)
        return {what for what, since_s in self._since.items() if clock_s - since_s >= self._config.every_s}
