"""Leave early, all ranks after the same step: on a signal, or before a time limit.

A cluster warns a job that it is to end (a signal), or has told it from the start when that will be (the time limit).
One rank may hear of it and another not, or a step later. So the ranks meet every few steps, and agree. Ranks that serve
others in a loop are told after it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch import job_end
from hpcdist.errors import ConfigError
from hpcdist.session.world import loop_ranks, note_reason

# SIGTERM: Slurm, before it kills (preemption, scancel, the time limit). SIGUSR1: `sbatch --signal=USR1@120`, and what
# mpirun and srun pass on to their ranks. SIGUSR2: the other one that sites use.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
GROWTH = 4  # the next meeting is at most so many times as many steps away as the last one was


class Leaving:
    """Collective, as are `agree`, `step_done` and `due`. Decide when all ranks save their state and leave.

    Inside `with Leaving(comm) as leaving:` the signals are noted and do nothing else. The ranks that train meet about
    every `every_s` seconds, which costs one small exchange, and share there the signals that any of them got.

    Args:
        ends_at: when the job is ended from outside, in seconds since 1970; "slurm" for the end of this Slurm job, if it
            has one; None for never, or where another rank knows. The earliest one of all ranks counts.
        margin_s: seconds to be left then, in addition to those of `cost_s`.
        every_s: seconds between meetings, about; a signal is obeyed after at most so long.
        cost_s: () -> seconds that this rank expects leaving to take: its checkpoint.
        signals: leave on signals, too. Only the main thread of a process can listen to them.
        ctrl_c: take Ctrl-C (SIGINT) as such a signal; a second one ends the process at once.
        clock: () -> seconds since 1970.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        ends_at: float | str | None = None,
        margin_s: float = 30.0,
        every_s: float = 5.0,
        cost_s: Callable[[], float] = lambda: 0.0,
        signals: bool = True,
        ctrl_c: bool = False,
        clock: Callable[[], float] = time.time,
    ):
        if ends_at == "slurm":
            ends_at = job_end(os.environ) if comm.rank == comm.failures.alive[0] else None
        if isinstance(ends_at, str):
            raise ConfigError(f"ends_at must be seconds since 1970, 'slurm' or None; got {ends_at!r}.")
        self.comm, self.margin_s, self.every_s = comm, margin_s, every_s
        self.ends_at = min((moment for moment in comm.gather(ends_at) if moment is not None), default=None)
        self.reason: str | None = None  # once all ranks know that they are to leave
        self.steps = 1  # between the last meeting and the next one
        self.clock_s: float | None = None  # of the last meeting, the same on all ranks: by the first living one's clock
        self.heard: Callable[[str], object] = lambda name: None  # called with the name of the first signal, at once
        self._cost_s, self._clock = cost_s, clock
        self._listens = signals and threading.current_thread() is threading.main_thread()
        self._signals = (*SIGNALS, signal.SIGINT) if ctrl_c else SIGNALS
        self._heard: str | None = None
        self._told: str | None = None
        self._stepped = False  # `step_done` has been called since `due`
        self._before: dict[signal.Signals, Any] = {}
        self._left, self._since_s = self.steps, comm.now()

    def __enter__(self) -> Leaving:
        if self._listens:
            self._before = {number: signal.signal(number, self._hear) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _hear(self, number: int, _frame: object) -> None:
        first, self._heard = self._heard is None, signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the next one ends this process, whatever it waits for
        if first:
            self.heard(self._heard)

    def step_done(self) -> str | None:
        """Collective. Return, after each step, the reason to leave now, the same on all ranks that train; mostly None.

        Leave the loop then by `break`, and let `due()` behind it tell the ranks that serve.

        Raises:
            ConfigError: outside of the `with` block, where no signal would be heard.
        """
        if self._listens and not self._before:
            raise ConfigError(
                "hd.Leaving must be used as `with hd.Leaving(comm) as leaving:`, which listens to signals; got "
                "step_done() outside of that block. Put the loop into it."
            )
        self._left, self._stepped = self._left - 1, True
        return self.agree(self.steps) if self._left == 0 else None

    def due(self) -> str | None:
        """Collective. Return, after the training loop, the reason to leave now, the same on all ranks; None to go on.

        Ranks that serve learn it here. A signal that nobody has obeyed in a step is obeyed in the next epoch's first
        steps, so that what ends an epoch (a schedule's step, an evaluation) is done; or now, in a loop that calls no
        `step_done`.
        """
        mine = [self.reason, self._heard_signal(), self._stepped]
        of_all = self.comm.failures.retry_on_failure(lambda: self.comm.gather(mine))
        reasons, signals, stepped = zip(*(of_all[rank] for rank in self.comm.failures.alive))
        self.reason, self._told = next(filter(None, reasons), None), next(filter(None, signals), None)
        if not any(stepped):  # nobody meets in steps
            self.reason = self.reason or self._told
        self._stepped = False
        note_reason(self.reason)
        return self.reason

    def agree(self, steps: int, soon_s: float = 0.0) -> str | None:
        """Collective. Return the reason to leave now, the same on all ranks; None to go on, for `self.steps` steps.

        Args:
            steps: made since the last meeting, at least 1.
            soon_s: seconds that something else than steps will take before the next meeting.
        """
        now_s, comm = self.comm.now(), loop_ranks(self.comm)
        mine = [self._heard_signal(), (now_s - self._since_s) / steps, self._cost_s() + soon_s, self._clock()]
        of_all = comm.failures.retry_on_failure(lambda: comm.gather(mine))
        heard, step_s, cost_s, clock_s = zip(*(of_all[rank] for rank in comm.failures.alive))
        self._plan(max(step_s))
        signals = list(filter(None, heard))
        self.clock_s = clock_s[0]  # one for all: ranks' clocks may differ
        left_s = float("inf") if self.ends_at is None else self.ends_at - self.clock_s
        if signals:
            self.reason = signals[0]
        elif left_s < self.steps * max(step_s) + max(cost_s) + self.margin_s:
            self.reason = f"the time limit, {max(left_s, 0.0):.0f} s ahead"
        self._since_s = self.comm.now()
        return self.reason

    def _heard_signal(self) -> str | None:
        """Return the signal that this rank got, or that `due` has told of."""
        return self._told or (self._heard and f"{self._heard} on rank {self.comm.rank}")

    def _plan(self, step_s: float) -> None:
        wanted = int(self.every_s / step_s) if step_s > 0 else GROWTH * self.steps
        self.steps = self._left = max(1, min(wanted, GROWTH * self.steps))
