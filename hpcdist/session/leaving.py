"""Stop training early, on all ranks after the same step: on a signal, or before a time limit.

A cluster announces a job's end by a signal, or by a time limit that is known from the start. A signal may reach only
one rank, or ranks in different steps, so ranks exchange signals every few steps; servers learn of it after the loop.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch import job_end, launch_command
from hpcdist.errors import ConfigError
from hpcdist.session.world import last_step, loop_ranks, set_leave_reason

# SIGTERM: sent by Slurm before SIGKILL (preemption, scancel, the time limit). SIGUSR1: `sbatch --signal=USR1@120`, and
# forwarded by mpirun and srun to their ranks. SIGUSR2: used by some sites.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_log = logging.getLogger("hpcdist")
GROWTH = 4  # the number of steps between exchanges grows at most by this factor


class Leaving:
    """Decide jointly on all ranks when to save and leave. Collective, as are `agree`, `step_done` and `due`.

    Inside `with Leaving(comm) as leaving:` signals are recorded, and have no other effect. About every `every_s`
    seconds the workers exchange the signals that any of them received, in one small message. At the end of the block
    one rank reports the step after which a loop has left, and the command that resumes it.

    Example:
        >>> with hd.Leaving(comm, ends_at="slurm", margin_s=60) as leaving:
        ...     reason = leaving.step_done()  # after each step; save a checkpoint and break unless it is None

    Args:
        ends_at: end of the job, in seconds since 1970; "slurm": end of this Slurm job, if any; None: unlimited, or
            known to another rank. The earliest time of all ranks counts.
        margin_s: seconds to remain at that time, in addition to `cost_s`.
        every_s: approximate seconds between exchanges: the maximum delay until a signal takes effect.
        cost_s: () -> expected seconds that leaving takes on this rank, mostly for its checkpoint.
        signals: leave on signals too. Only the main thread of a process can receive them.
        ctrl_c: treat Ctrl-C (SIGINT) as such a signal; a second Ctrl-C ends the process immediately.
        clock: () -> seconds since 1970.
    """

    def __init__(
        self, comm: Communicator, *, ends_at: float | str | None = None, margin_s: float = 30.0, every_s: float = 5.0,
        cost_s: Callable[[], float] = lambda: 0.0, signals: bool = True, ctrl_c: bool = False,
        clock: Callable[[], float] = time.time,
    ):  # fmt: skip
        if ends_at == "slurm":
            ends_at = job_end(os.environ) if comm.rank == comm.failures.alive[0] else None
        if isinstance(ends_at, str):
            raise ConfigError(f"ends_at must be seconds since 1970, 'slurm' or None; got {ends_at!r}.")
        self.comm, self.margin_s, self.every_s = comm, margin_s, every_s
        self.ends_at = min((moment for moment in comm.gather(ends_at) if moment is not None), default=None)
        self.reason: str | None = None  # set on all ranks after the same exchange
        self.steps = 1  # from the last exchange to the next one
        self.clock_s: float | None = None  # clock of the first surviving rank at the last exchange, for all ranks
        self.on_signal: Callable[[str], object] = lambda name: None  # called with the first signal's name, immediately
        self._cost_s, self._clock = cost_s, clock
        self._listens = signals and threading.current_thread() is threading.main_thread()
        self._signals = (*SIGNALS, signal.SIGINT) if ctrl_c else SIGNALS
        self._heard: str | None = None
        self._announced: str | None = None
        self._stepped = False  # `step_done` has been called since `due`
        self._left: str | None = None  # what `due` has decided, for the user
        self._before: dict[signal.Signals, Any] = {}
        self._remaining, self._since_s = self.steps, comm.now()

    def __enter__(self) -> Leaving:
        if self._listens:
            self._before = {number: signal.signal(number, self._record_signal) for number in self._signals}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        saved = kind in (None, SystemExit)
        if self._left is not None and saved and self.comm.rank == self.comm.failures.alive[0]:
            command = shlex.join([*launch_command(os.environ, self.comm.size), "python", *sys.orig_argv[1:]])
            _log.info(f"{self._left}. Resume with:\n  {command}")

    def _record_signal(self, number: int, _frame: object) -> None:
        """Record a signal: the handler of all SIGNALS. After any of them, SIGINT ends this process."""
        first, self._heard = self._heard is None, signal.Signals(number).name
        if signal.SIGINT in self._signals:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if first:
            self.on_signal(self._heard)

    def step_done(self) -> str | None:
        """Collective. Return the reason to leave after this step, the same on all workers; mostly None.

        Call it after each step. Leave the loop by `break`, and call `due()` after the loop, also for the server ranks.

        Raises:
            ConfigError: called outside of the `with` block, where signals are not received.
        """
        if self._listens and not self._before:
            raise ConfigError(
                "hd.Leaving must be used as `with hd.Leaving(comm) as leaving:`, which receives signals; got "
                "step_done() outside of that block. Put the loop into it."
            )
        self._remaining, self._stepped = self._remaining - 1, True
        return self.agree(self.steps) if self._remaining == 0 else None

    def due(self) -> str | None:
        """Collective. Return the reason to leave after the training loop, the same on all ranks; None to continue.

        Server ranks learn the reason here. A signal that arrived after the last exchange of the epoch takes effect in
        the first steps of the next one, after the work at the epoch's end (a schedule's step, an evaluation); or
        immediately, if the loop does not call `step_done`.
        """
        local = [self.reason, self._heard_signal(), self._stepped, last_step()]
        gathered = self.comm.failures.retry_on_failure(lambda: self.comm.gather(local))
        reasons, signals, stepped, steps = zip(*(gathered[rank] for rank in self.comm.failures.alive))
        self.reason, self._announced = next(filter(None, reasons), None), next(filter(None, signals), None)
        if not any(stepped):  # no exchanges in steps
            self.reason = self.reason or self._announced
        self._stepped = False
        set_leave_reason(self.reason)
        self._left = self.reason and f"left after step {max(steps)} ({self.reason})"
        return self.reason

    def agree(self, steps: int, soon_s: float = 0.0) -> str | None:
        """Collective. Exchange signals and times; return the joint reason to leave, None to do `self.steps` more steps.

        Args:
            steps: number of steps since the last exchange, at least 1.
            soon_s: seconds of other work before the next exchange.
        """
        now_s, comm = self.comm.now(), loop_ranks(self.comm)
        local = [self._heard_signal(), (now_s - self._since_s) / steps, self._cost_s() + soon_s, self._clock()]
        gathered = comm.failures.retry_on_failure(lambda: comm.gather(local))
        heard, step_s, cost_s, clock_s = zip(*(gathered[rank] for rank in comm.failures.alive))
        limit = GROWTH * self.steps
        self.steps = self._remaining = max(1, min(int(self.every_s / max(step_s)) if max(step_s) > 0 else limit, limit))
        signals = list(filter(None, heard))
        self.clock_s = clock_s[0]  # the same for all: clocks of ranks may differ
        remaining_s = float("inf") if self.ends_at is None else self.ends_at - self.clock_s
        if signals:
            self.reason = signals[0]
        elif remaining_s < self.steps * max(step_s) + max(cost_s) + self.margin_s:
            self.reason = f"the time limit, {max(remaining_s, 0.0):.0f} s ahead"
        self._since_s = self.comm.now()
        return self.reason

    def _heard_signal(self) -> str | None:
        """Return the signal that this rank received, or that `due` announced."""
        return self._announced or (self._heard and f"{self._heard} on rank {self.comm.rank}")
