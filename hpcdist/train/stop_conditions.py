"""When a run is evaluated, saves a checkpoint and ends: by steps, samples, time, or evaluations without progress."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from hpcdist.comm.communicator import Communicator
from hpcdist.config.job import JobConfig
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.session.leaving import Leaving
from hpcdist.train.job import Job
from hpcdist.train.resume import Position

GROWTH = 4  # the number of steps between two checks of the clock grows at most by this factor
SPARE = 0.9  # the next check follows after this part of the remaining seconds, because later steps may be slower


class StopConditions:
    """Computes the number of steps until a run's next evaluation or its end, by epochs or a budget.

    Args:
        position: of the run.
        n_samples: samples in an epoch.

    Attributes:
        global_batch: samples of a step, of all ranks.
        stopped: the reason to end earlier; None to continue.
    """

    def __init__(self, config: JobConfig, comm: Communicator, position: Position, n_samples: int):
        self.n_samples, self.global_batch = n_samples, 1
        self.stopped: str | None = None
        self._config, self._comm, self._position = config, comm, position
        self._seconds = 0.0  # of training, the same on all ranks
        self._clocks = [0.0] * comm.size  # each rank's seconds at the last check
        self._steps_to_check = 1  # until the next check of the clock

    @property
    def samples(self) -> int:
        """Samples so far, of all ranks."""
        return self._position.epoch * self.n_samples + self._position.consumed

    @property
    def ended(self) -> bool:
        """Whether the run has reached its last epoch or a budget, or has stopped early."""
        epochs, budget = self._config.epochs, self._config.budget
        limits = (
            (self._position.epoch, epochs),
            (self._position.step, budget.steps),
            (self.samples, budget.samples),
            (self._seconds, budget.seconds),
        )
        return self.stopped is not None or any(limit is not None and done >= limit for done, limit in limits)

    @property
    def steps(self) -> int | None:
        """Steps to the next evaluation, end or check of the clock; None if there is none."""
        budget, ahead = self._config.budget, [self.steps_to_evaluation]
        ahead.append(None if budget.samples is None else self._steps_to(budget.samples))
        ahead.append(None if budget.steps is None else budget.steps - self._position.step)
        ahead.append(None if budget.seconds is None else self._steps_to_check)
        return min((steps for steps in ahead if steps is not None), default=None)

    @property
    def steps_to_evaluation(self) -> int | None:
        """Steps to the next evaluation by `eval_every_samples`; None without it."""
        every = self._config.eval_every_samples
        return None if every is None else self._steps_to((self.samples // every + 1) * every)

    def evaluates(self, before: int) -> bool:
        """Return whether an evaluation is due, by the number of samples now and `before` the last steps."""
        every = self._config.eval_every_samples
        return every is not None and self.samples // every > before // every

    def _steps_to(self, samples: int) -> int:
        """Return the number of steps until the run has taken this number of samples."""
        return -(-(samples - self.samples) // self.global_batch)

    def check_clock(self, train_s: float, steps: int = 0) -> None:
        """Agree on the seconds of training so far: the first surviving rank's. Collective with a budget of seconds.

        Args:
            train_s: this rank's seconds of training.
            steps: number of steps since the last check.

        Raises:
            ConfigError: steps take no time.
        """
        budget_s = self._config.budget.seconds
        if budget_s is None:
            return
        before, self._clocks = self._clocks, self._comm.failures.retry_on_failure(lambda: self._comm.gather(train_s))
        first = self._comm.failures.alive[0]
        now_s = self._clocks[first]
        if steps:
            step_s = (now_s - before[first]) / steps  # by one clock: that of a failed rank may have been ahead
            if step_s <= 0:
                raise ConfigError(
                    f"budget.seconds must be set only if steps take time; got {budget_s:g}, and virtual ranks whose "
                    "steps take none. Set a compute model, or a budget of samples."
                )
            self._steps_to_check = max(1, min(int(SPARE * (budget_s - now_s) / step_s), GROWTH * self._steps_to_check))
        self._seconds = now_s

    def total_samples(self, now: int) -> int:
        """Estimate the samples of the whole run; `now` are the samples so far."""
        budget = self._config.budget
        totals = [total] if (total := planned_samples(self._config, self.n_samples)) is not None else []
        if budget.steps is not None:
            totals.append(self.samples + (budget.steps - self._position.step) * self.global_batch)
        if budget.seconds is not None and self._seconds:
            totals.append(int(self.samples * budget.seconds / self._seconds))
        return now if self.ended else max(now, min(totals, default=self.n_samples))


def planned_samples(config: JobConfig, n_samples: int) -> int | None:
    """Return the number of samples of a whole run, limited by epochs and budget; None without a limit."""
    limits = [None if config.epochs is None else config.epochs * n_samples, config.budget.samples]
    return min((limit for limit in limits if limit is not None), default=None)


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
