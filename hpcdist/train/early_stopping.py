"""Rank a run's evaluations by one metric: the best one, and the number of evaluations since."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from hpcdist.config.job import JobConfig
from hpcdist.errors import UnknownNameError
from hpcdist.train.job import Job


class EarlyStopping:
    """Sorts a run's evaluations by `stop.metric`, and stops the run if they don't improve; the same on all ranks.

    Attributes:
        metric: its name.
        improved: the newest evaluation is the best so far.

    Raises:
        UnknownNameError: the job has no such metric.
    """

    def __init__(self, job: Job, config: JobConfig):
        known = [*job.metrics, "loss"]
        self.metric = known[0] if config.stop.metric is None else config.stop.metric
        if self.metric not in known:
            raise UnknownNameError("stop.metric", self.metric, known)
        self._sign = 1 if self.metric in job.metrics and job.metrics[self.metric].higher_is_better else -1
        self._patience = config.stop.patience
        self._evaluations: list[tuple[int, float]] = []  # step and value
        self.improved = False

    def add(self, evaluations: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Add evaluations (step, metrics); a step that is known already is ignored."""
        for step, metrics in evaluations:
            if not self._evaluations or step > self._evaluations[-1][0]:
                self._evaluations.append((step, metrics.get(self.metric, math.nan)))
                self.improved = self.steps[:1] == [step]

    @property
    def steps(self) -> list[int]:
        """Return the steps of the evaluations, the best first, without those that are not finite."""
        finite = [(step, value) for step, value in self._evaluations if math.isfinite(value)]
        return [step for step, value in sorted(finite, key=lambda pair: -self._sign * pair[1])]

    @property
    def best(self) -> tuple[int, float] | None:
        """Return step and value of the best evaluation, the earliest of equal ones; None without any."""
        return None if not self.steps else (self.steps[0], dict(self._evaluations)[self.steps[0]])

    @property
    def reason(self) -> str | None:
        """Return why the run stops: `stop.patience` evaluations without improvement; else None."""
        return str(self) if self._patience is not None and self._waited >= self._patience else None

    @property
    def _waited(self) -> int:
        """Return the number of evaluations since the best one; all, if none is finite."""
        best = self.best
        return sum(best is None or step > best[0] for step, _ in self._evaluations)

    def __str__(self) -> str:
        waited = f"{self._waited} evaluation{'s' * (self._waited > 1)}"
        if self.best is None:
            return f"{self.metric} not finite for {waited}"
        step, value = self.best
        return f"{self.metric} no better for {waited}; best {value:.4g} at step {step}"
