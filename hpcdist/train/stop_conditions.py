"""The conditions that end a run, and the steps at which it is evaluated inside an epoch."""

from __future__ import annotations

from hpcdist.comm.communicator import Communicator
from hpcdist.config.job import JobConfig
from hpcdist.errors import ConfigError
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
